"""Tiny models of ZeroModels, made from configs, and data for them.

One or two blocks of width 16, with the layers of their family. No weights
are loaded.
"""

import keras
import numpy as np
from zeromodels import diffusers, models

from keras_policy_ext._keras import walking
from keras_policy_ext.layers.state import Float8State

TOKENS, BATCH, LENGTH, SIDE = 48, 4, 6, 32

# Of a decoder of the family of Llama.
_DECODER = {
    "vocab_size": TOKENS,
    "embed_dim": 16,
    "mlp_dim": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}
# Each token asks all of them, so that rounding changes no choice.
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2}
_ENCODER_AND_DECODER = {
    "vocab_size": TOKENS,
    "hidden_dim": 16,
    "encoder_num_layers": 1,
    "decoder_num_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def gpt2():
    return models.gpt2.GPT2TextGenerate(
        vocab_size=TOKENS,
        embed_dim=16,
        mlp_dim=32,
        num_layers=2,
        num_heads=2,
        max_position_embeddings=16,
    )


def gemma():
    return models.gemma.GemmaTextGenerate(**_DECODER)


def qwen3():
    return models.qwen3.Qwen3TextGenerate(**_DECODER)


def llama():
    return models.llama.LlamaTextGenerate(**_DECODER, tie_embeddings=False)


def mixtral():
    return models.mixtral.MixtralTextGenerate(**_DECODER, **_EXPERTS)


def gpt_oss():
    return models.gpt_oss.GptOssTextGenerate(**_DECODER, **_EXPERTS)


def bart():
    return models.bart.BartConditionalGenerate(
        **_ENCODER_AND_DECODER, max_position_embeddings=16
    )


def moonshine():
    return models.moonshine.MoonshineConditionalGenerate(
        **_ENCODER_AND_DECODER, partial_rotary_factor=0.5
    )


def whisper():
    return models.whisper.WhisperAudioClassify(
        hidden_dim=16,
        encoder_num_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=8,
        num_classes=4,
        classifier_proj_size=16,
    )


def swin():
    return models.swin.SwinImageClassify(
        pretrain_size=SIDE,
        window_size=4,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 2),
        image_size=SIDE,
        num_classes=4,
    )


def segformer():
    return models.segformer.SegFormerSemanticSegment(
        embed_dim=[8, 16, 20, 16],  # For 1, 2, 5 and 8 heads.
        depths=[1, 1, 1, 1],
        decode_head_dim=16,
        num_classes=4,
        image_size=SIDE,
    )


def owlvit():
    return models.owlvit.OwlViTDetect(
        vision_image_size=SIDE,
        vision_patch_size=8,
        vision_hidden_dim=16,
        vision_intermediate_size=32,
        vision_num_layers=1,
        vision_num_heads=2,
        text_hidden_dim=16,
        text_intermediate_size=32,
        text_num_heads=2,
        projection_dim=16,
        text_num_layers=1,
        text_max_position_embeddings=LENGTH,
        text_vocab_size=TOKENS,
    )


def stable_diffusion():
    return diffusers.stable_diffusion.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=16,
        num_attention_heads=2,
        norm_num_groups=4,
        text_seq_len=LENGTH,
    )


FAMILIES = {
    f.__name__: f
    for f in (
        *(gpt2, gemma, qwen3, llama, mixtral, gpt_oss),
        *(bart, moonshine, whisper),
        *(swin, segformer, owlvit, stable_diffusion),
    )
}


def tied_llama():
    return models.llama.LlamaTextGenerate(**_DECODER, tie_embeddings=True)


def t5():
    return models.t5.T5ConditionalGenerate(
        vocab_size=TOKENS,
        embed_dim=16,
        key_value_dim=8,
        mlp_dim=32,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        hidden_act="relu",
    )


WITH_TIED_HEAD = {f.__name__: f for f in (tied_llama, gemma, qwen3, t5)}
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


def numpy(x):
    # PyTorch's arrays are views, which change with the tensor.
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")))


def outputs(model, inputs):
    """All outputs of a call, one after the other."""
    found = keras.tree.flatten(model(inputs, training=False))
    return np.concatenate([numpy(x).ravel() for x in found])


def compiled(model):
    """A model of which a step takes the gradient from the weights."""
    loss = keras.tree.map_structure(lambda _: "mse", model.output)
    # XLA takes longer than it saves, but JAX knows no other compiler.
    model.compile(
        keras.optimizers.SGD(1.0),
        loss,
        jit_compile=keras.backend.backend() == "jax",
    )
    return model


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


def layers_of(model):
    """All layers, without the states of float8 layers."""
    return [
        layer
        for layer in walking.layers_within(model)
        if not isinstance(layer, Float8State)
    ]


def error(got, expected):
    """The relative error of arrays, or of lists of them."""
    if isinstance(got, list):
        got, expected = (
            np.concatenate([x.ravel() for x in each])
            for each in (got, expected)
        )
    return np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
