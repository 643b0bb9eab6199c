"""Tiny models of ZeroModels, made from configs, and data for them.

One or two blocks of width 16, with the layers of their family. No weights
are loaded.
"""

import functools

import keras
import numpy as np
from model_sizes import Sizes, compile_to_train, layers_of, numpy
from zeromodels import diffusers, models

TOKENS, BATCH, LENGTH, SIDE = 48, 4, 6, 32
SIZES = Sizes(TOKENS, 16, width=16, inner=32, heads=2, groups=1, blocks=1)

_TEXT = SIZES.under(
    vocab_size="tokens", embed_dim="width", mlp_dim="inner", num_heads="heads"
)
_DECODER = {
    **_TEXT,
    **SIZES.under(num_layers="blocks", num_kv_heads="groups", head_dim="head"),
}
# Each token asks all of them, so that rounding changes no choice.
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2}
_ENCODER = SIZES.under(
    hidden_dim="width",
    encoder_num_layers="blocks",
    encoder_attention_heads="heads",
    encoder_ffn_dim="inner",
)
_ENCODER_AND_DECODER = {
    **_ENCODER,
    **SIZES.under(
        vocab_size="tokens",
        decoder_num_layers="blocks",
        decoder_attention_heads="heads",
        decoder_ffn_dim="inner",
    ),
}
_WITH_PLACES = SIZES.under(max_position_embeddings="length")
_IMAGE = {"image_size": SIDE, "num_classes": 4}
_TWO_TOWERS = {
    f"{tower}_{name}": size
    for tower in ("vision", "text")
    for name, size in SIZES.under(
        hidden_dim="width",
        intermediate_size="inner",
        num_layers="blocks",
        num_heads="heads",
    ).items()
}


def _of(cls, *sizes, **more):
    """A function that makes a model of these sizes."""
    return functools.partial(
        cls, **{k: v for each in (*sizes, more) for k, v in each.items()}
    )


FAMILIES = {
    "gpt2": _of(
        models.gpt2.GPT2TextGenerate, _TEXT, _WITH_PLACES, num_layers=2
    ),
    "gemma": _of(models.gemma.GemmaTextGenerate, _DECODER),
    "qwen3": _of(models.qwen3.Qwen3TextGenerate, _DECODER),
    "llama": _of(
        models.llama.LlamaTextGenerate, _DECODER, tie_embeddings=False
    ),
    "mixtral": _of(models.mixtral.MixtralTextGenerate, _DECODER, _EXPERTS),
    "gpt_oss": _of(models.gpt_oss.GptOssTextGenerate, _DECODER, _EXPERTS),
    "bart": _of(
        models.bart.BartConditionalGenerate, _ENCODER_AND_DECODER, _WITH_PLACES
    ),
    "moonshine": _of(
        models.moonshine.MoonshineConditionalGenerate,
        _ENCODER_AND_DECODER,
        partial_rotary_factor=0.5,
    ),
    "whisper": _of(
        models.whisper.WhisperAudioClassify,
        _ENCODER,
        encoder_num_layers=2,
        num_mel_bins=8,
        max_source_positions=8,
        num_classes=4,
        classifier_proj_size=16,
    ),
    "swin": _of(
        models.swin.SwinImageClassify,
        _IMAGE,
        pretrain_size=SIDE,
        window_size=4,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 2),
    ),
    "segformer": _of(
        models.segformer.SegFormerSemanticSegment,
        _IMAGE,
        embed_dim=[8, 16, 20, 16],  # For 1, 2, 5 and 8 heads.
        depths=[1, 1, 1, 1],
        decode_head_dim=16,
    ),
    "owlvit": _of(
        models.owlvit.OwlViTDetect,
        _TWO_TOWERS,
        vision_image_size=SIDE,
        vision_patch_size=8,
        projection_dim=16,
        text_max_position_embeddings=LENGTH,
        text_vocab_size=TOKENS,
    ),
    "stable_diffusion": _of(
        diffusers.stable_diffusion.UNet2DConditionModel,
        sample_size=8,
        block_out_channels=(16, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=16,
        num_attention_heads=2,
        norm_num_groups=4,
        text_seq_len=LENGTH,
    ),
}

WITH_TIED_HEAD = {
    "tied_llama": _of(
        models.llama.LlamaTextGenerate, _DECODER, tie_embeddings=True
    ),
    "gemma": FAMILIES["gemma"],
    "qwen3": FAMILIES["qwen3"],
    "t5": _of(
        models.t5.T5ConditionalGenerate,
        _TEXT,
        key_value_dim=8,
        num_layers=1,
        num_decoder_layers=1,
        hidden_act="relu",
    ),
}
"""Models with a layer that multiplies with the table of an embedding."""

TIED = ("gpt2", "gemma", "qwen3")
"""Language models that multiply with the table of their embedding."""

LANGUAGE = (*TIED, "llama", "mixtral", "gpt_oss")

# Sizes that models leave open, by the name of the input: of spectrograms and
# of sound, which the models shorten.
_OPEN = {"input_features": 16, "input_values": 1024}


def model_of(family):
    """A model with random weights, the same on each backend; no dropout."""
    model = {**WITH_TIED_HEAD, **FAMILIES}[family]()
    for layer in layers_of(model):
        for rate in ("rate", "drop_path_rate"):
            if hasattr(layer, rate):
                setattr(layer, rate, 0.0)
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        shape = variable.shape
        random = rng.normal(size=shape)
        if len(shape) > 1:
            is_table = variable.name == "embeddings"
            inputs = shape[-1] if is_table else np.prod(shape[:-1])
            if len(shape) == 3:
                inputs /= shape[0]  # A bank of experts.
            variable.assign(random / np.sqrt(inputs))
        else:
            variable.assign(numpy(variable) + random / 9)
    return model


def data(model, batch=BATCH, texts=LENGTH):
    """A batch for a model: a dictionary, or an array for its only input."""
    rng = np.random.default_rng(0)

    def array(tensor):
        length = _OPEN.get(tensor.name, texts)
        shape = [batch, *(n or length for n in tensor.shape[1:])]
        if tensor.name == "attention_mask":
            return np.ones(shape, "int32")
        if tensor.dtype == "int32":
            # The first ones end or fill a text.
            return rng.integers(3, TOKENS, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    return keras.tree.map_structure(array, model.input)


def outputs(model, inputs):
    """All outputs of a call, one after the other."""
    found = keras.tree.flatten(model(inputs, training=False))
    return np.concatenate([numpy(x).ravel() for x in found])


def compiled(model):
    """A model of which a step takes the gradient from the weights."""
    loss = keras.tree.map_structure(lambda _: "mse", model.output)
    return compile_to_train(model, keras.optimizers.SGD(1.0), loss)


def step(model, inputs):
    """The loss of a step of a compiled model, and the gradients.

    The weights are then put back.
    """
    rng = np.random.default_rng(2)
    targets = keras.tree.map_structure(
        lambda x: rng.normal(size=x.shape), model(inputs, training=False)
    )
    before = arrays(model, state=False)
    loss = float(np.ravel(model.train_on_batch(inputs, targets))[0])
    after = arrays(model, state=False)
    weights = filter(is_weight, model.weights)
    for variable, value in zip(weights, before, strict=True):
        variable.assign(value)
    changes = [old - new for old, new in zip(before, after, strict=True)]
    trained = {id(v) for v in model.trainable_variables}
    weights = filter(is_weight, model.weights)
    pairs = zip(weights, changes, strict=True)
    return loss, [change for v, change in pairs if id(v) in trained]


def is_weight(variable):
    """Whether a variable is a weight, and no state of a float8 layer."""
    return "float8_state" not in variable.path


def arrays(model, state=True):
    """The weights in order; those of the states only on request.

    Layers without names of their own have other paths in another model.
    """
    return [numpy(v) for v in model.weights if state or is_weight(v)]


def assert_same_arrays(got, expected):
    """The same bits."""
    for each, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(each, other)


def error(got, expected):
    """The relative error of arrays, or of lists of them."""
    if isinstance(got, list):
        got, expected = (
            np.concatenate([x.ravel() for x in each])
            for each in (got, expected)
        )
    return np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
