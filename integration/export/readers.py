"""The real readers, and what is compared with them."""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent

transformers.utils.logging.disable_progress_bar()


def read(folder, dtype=torch.float32):
    """A folder as transformers reads it."""
    cls = transformers.AutoModelForCausalLM
    return cls.from_pretrained(folder, dtype=dtype).eval()


def logits(reader, ids):
    with torch.no_grad():
        made = reader(torch.tensor(ids, dtype=torch.long)).logits
    return made.float().numpy()


def greedy(reader, prompts, count):
    """Prompts and the most likely tokens after them, one after the other."""
    prompts = torch.tensor(prompts, dtype=torch.long)
    with torch.no_grad():
        made = reader.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
    return made.numpy()


def weights(reader):
    """Its weights in float32, by the ends of their names."""
    return {
        name.removeprefix("model.").removeprefix("language_model."): value
        for name, value in (
            (name, parameter.detach().float().numpy())
            for name, parameter in reader.state_dict().items()
        )
    }


def sqnr_db(expected, received):
    """Signal to noise, in dB; a number for equal ones too."""
    noise = np.linalg.norm(expected - received)
    return 20 * np.log10(np.linalg.norm(expected) / max(noise, 1e-30))


def median_token_db(expected, received):
    return np.median(
        [
            sqnr_db(e, r)
            for e, r in zip(
                expected.reshape(-1, expected.shape[-1]),
                received.reshape(-1, received.shape[-1]),
                strict=True,
            )
        ]
    )
