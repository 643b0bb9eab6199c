"""What transformers and compressed-tensors read of an exported folder."""

import functools
import json

import keras
import numpy as np
import pytest
import readers
import tiny_models as tiny
import torch
from safetensors import safe_open

import keras_policy_ext as kpe
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.stored_kernels import tile_of

# The readers compute logits in floats, so that layer is left in floats here.
HEAD = "token_embedding"

SCHEMES = [
    ("compressed-tensors", "channel", None),
    ("compressed-tensors", "tensor", None),
    ("compressed-tensors", "block", None),
    ("compressed-tensors", "channel", "dynamic"),
    ("compressed-tensors", "tensor", "static"),
    ("modelopt", "tensor", "static"),
    ("fp8", "block", None),
    ("fp8", "tensor", None),
]
PROVED = [
    *[("llama", *scheme) for scheme in SCHEMES],
    *[("gemma", *scheme) for scheme in SCHEMES],
    ("gpt2", "compressed-tensors", "channel", None),
    ("gpt2", "compressed-tensors", "tensor", None),
    ("mistral", "compressed-tensors", "channel", "dynamic"),
    ("qwen", "compressed-tensors", "tensor", "static"),
    ("qwen", "fp8", "block", None),
    ("gemma3", "compressed-tensors", "channel", "dynamic"),
    ("gemma3", "compressed-tensors", "channel", None),
    ("gemma4", "compressed-tensors", "channel", None),
    ("qwen3_5", "compressed-tensors", "channel", "dynamic"),
]


def trained(name, **sizes):
    """A model that learned in float8 that each token follows another."""
    model = tiny.FAMILIES[name](**sizes)
    kpe.convert(model, "delayed", exclude=HEAD)
    model.set_weights(learned(name, **sizes))
    return model


@functools.cache
def learned(name, **sizes):
    """The weights of that model, and the scales that it has seen."""
    keras.utils.set_random_seed(0)
    model = tiny.randomized(tiny.FAMILIES[name](**sizes))
    kpe.convert(model, "delayed", exclude=HEAD)
    model.compile(
        keras.optimizers.Adam(0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        sampler="greedy",
        jit_compile=keras.backend.backend() == "jax",
    )
    for step in range(12):
        ids = tiny.successors(8, tiny.LENGTH + 1, seed=step)
        model.train_on_batch(tiny.inputs(model, ids[:, :-1]), ids[:, 1:])
    return model.get_weights()


def in_floats(name, **sizes):
    """The same, of which no layer computes in float8 any more."""
    model = trained(name, **sizes)
    kpe.revert(model)
    return model


PACKED = [
    ("int4", "group"),
    ("int4", "channel"),
    ("int8", "channel"),
    ("int8", "group"),
]


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen"])
@pytest.mark.parametrize(("weights", "granularity"), PACKED)
def test_integers_are_read_as_the_frozen_model_has_them(
    name, weights, granularity, tmp_path
):
    sizes = {"width": 64, "inner": 96}  # Whole groups of 32.
    model = in_floats(name, **sizes)
    grid = f"{weights}(group=32)" if granularity == "group" else weights
    kpe.convert(model, grid, exclude=HEAD)
    kpe.freeze(
        model,
        weights=weights,
        granularity=granularity,
        exclude=HEAD,
    )
    report = kpe.export(model, tmp_path / "folder")
    reader = readers.read(tmp_path / "folder")
    ids = tiny.successors(8, tiny.LENGTH, seed=99)
    expected, received = tiny.logits(model, ids), readers.logits(reader, ids)
    assert_same_weights(reader, model, report)
    error = np.abs(received - expected).max() / np.abs(expected).max()
    print(f"largest error {error:.1e}")
    assert error < 1e-5
    assert_same_text(reader, model, least=10)


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen"])
def test_nvfp4_is_read_as_the_frozen_model_has_it(name, tmp_path):
    model = in_floats(name, width=64, inner=96)
    kpe.convert(model, "float4_e2m1fn", exclude=HEAD)
    kpe.freeze(model, exclude=HEAD)
    report = kpe.export(model, tmp_path / "folder")
    file = safe_open(tmp_path / "folder" / "model.safetensors", "np")
    divisors = {
        float(file.get_tensor(each)[0])
        for each in file.keys()  # noqa: SIM118
        if each.endswith("weight_global_scale")
    }
    assert len(divisors) == 1  # vLLM takes one for queries, keys and values.
    reader = readers.read(tmp_path / "folder")
    # It makes matrices of bfloat16, which has each number exactly.
    reader.hf_quantizer.compressor.decompress_model(reader)
    reader = torch.nn.Module.float(reader)
    assert_same_weights(reader, model, report)
    ids = tiny.successors(8, tiny.LENGTH, seed=99)
    expected, received = tiny.logits(model, ids), readers.logits(reader, ids)
    error = np.abs(received - expected).max() / np.abs(expected).max()
    print(f"largest error {error:.1e}")
    assert error < 1e-5
    assert_same_text(reader, model, least=10)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_inputs_are_rounded_to_int8_by_token(weights, tmp_path):
    model = in_floats("llama")
    kpe.freeze(model, weights=weights, activations="dynamic", exclude=HEAD)
    report = kpe.export(model, tmp_path / "folder")
    reader = readers.read(tmp_path / "folder")
    ids = tiny.successors(8, tiny.LENGTH, seed=99)
    expected, received = tiny.logits(model, ids), readers.logits(reader, ids)
    assert_same_weights(reader, model, report)
    # It divides an amax by 127.5, where vLLM and this package have 127: other
    # numbers, of the same number of bits.
    whole = readers.sqnr_db(expected, received)
    print(f"whole {whole:.1f} dB")
    assert whole > 30


def test_scales_of_nvfp4_that_are_too_far_apart_are_refused(tmp_path):
    model = in_floats("llama", width=64, inner=96)
    kernels = [v for v in model.weights if "query/kernel" in v.path]
    kernels[0].assign(kernels[0] * 0)  # Zeros are exact by any scale.
    kernels[1].assign(kernels[1] * 1e-3)
    how = dict(weights="float4_e2m1fn", granularity="group16")
    kpe.export(model, tmp_path / "folder", **how)
    kernels[1].assign(kernels[1] * 1e-3)
    with pytest.raises(ValueError, match="q_proj") as error:
        kpe.export(model, tmp_path / "other", **how)
    assert "Allowed" in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    kpe.export(model, tmp_path / "other", exclude="layer_1/.*query", **how)


def test_what_a_packed_folder_cannot_hold_is_refused(tmp_path):
    model = in_floats("llama")
    kpe.convert(model, "int4", exclude=HEAD)
    with pytest.raises(ValueError, match="trained for a grid"):
        kpe.export(model, tmp_path / "folder")
    kpe.freeze(model, weights="int3", exclude=HEAD)
    with pytest.raises(ValueError, match="weights='int3'"):
        kpe.export(model, tmp_path / "folder")
    with pytest.raises(ValueError, match="activations='static' beside int4"):
        kpe.export(
            in_floats("llama"),
            tmp_path / "folder",
            weights="int4",
            activations="static",
        )
    e2m1 = dict(weights="float4_e2m1fn", exclude=HEAD)
    for how, fault in (
        ({}, "granularity='channel'"),
        (dict(granularity="group16"), "scale_format='float32'"),
    ):
        model = in_floats("llama")
        kpe.freeze(model, **e2m1, **how)
        with pytest.raises(ValueError, match=fault) as error:
            kpe.export(model, tmp_path / "folder")
        assert "Allowed" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "format", "granularity", "inputs"), PROVED)
def test_reader_computes_what_the_frozen_model_does(
    name, format, granularity, inputs, tmp_path
):
    model = trained(name)
    kpe.freeze(
        model,
        granularity=granularity,
        activations=inputs,
        exclude=None if inputs else HEAD,
    )
    report = kpe.export(model, tmp_path / "folder", format)
    reader = readers.read(tmp_path / "folder")
    ids = tiny.successors(8, tiny.LENGTH, seed=99)
    expected, received = tiny.logits(model, ids), readers.logits(reader, ids)

    assert_same_weights(reader, model, report)
    whole = readers.sqnr_db(expected, received)
    median = readers.median_token_db(expected, received)
    print(f"whole {whole:.1f} dB, median token {median:.1f} dB")
    assert median > 100
    assert whole > (30 if inputs else 100)
    assert_same_text(reader, model)


def assert_same_weights(reader, model, report):
    """Bit for bit, as the reader has them after its first forward."""
    held = {
        variable.path: variable.stored
        for variable in model.weights
        if isinstance(variable, StoredVariable)
    }
    found = readers.weights(reader)
    quantized = [each for each in report.weights if each.quantized]
    assert len(quantized) >= 8
    for each in quantized:
        parts = [held.pop(path) for path in paths(each)]
        rows = [
            part.matrix.view(part.values.dtype).astype("float32")
            * scale_of_rows(part)
            for part in parts
        ]
        matrix = np.concatenate(rows)
        got = found[short(each.name)]
        matrix = matrix if got.shape == matrix.shape else matrix.T
        if "gpt2" in model.name:
            matrix = np.concatenate(rows).T
        np.testing.assert_array_equal(got, matrix, err_msg=each.name)
    assert not held  # All that is frozen is in float8 in the folder.


def short(name):
    return name.removeprefix("model.").removeprefix("language_model.")


def scale_of_rows(part):
    tile = tile_of(part.granularity)
    if tile is None:
        return part.matrix_scale
    sizes = zip(part.matrix.shape, tile, strict=True)
    rows, columns = (np.arange(size) // each for size, each in sizes)
    return part.matrix_scale[rows[:, None], columns[None, :]]


def assert_same_text(reader, model, count=20, least=9):
    """The same 20 tokens after nearly all of ten prompts."""
    prompts = tiny.successors(10, 4, seed=7)
    # Later tokens change nothing before them; JAX compiles for one length.
    ids = np.pad(prompts, [(0, 0), (0, count)])
    for end in range(prompts.shape[1], ids.shape[1]):
        ids[:, end] = tiny.logits(model, ids)[:, end - 1].argmax(axis=1)
    received = readers.greedy(reader, prompts, count)
    same = int(np.sum(np.all(received == ids, axis=1)))
    print(f"{same} of {len(prompts)} texts are the same")
    assert same >= least


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_kernels_are_quantized_while_they_are_written(name, tmp_path):
    model = tiny.randomized(tiny.FAMILIES[name]())
    before = values(model)
    report = kpe.export(model, tmp_path / "folder")
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path])
    received = readers.logits(readers.read(tmp_path / "folder"), tiny.tokens())
    kpe.freeze(model, exclude=HEAD)
    written = {p for w in report.weights if w.quantized for p in paths(w)}
    assert written == {
        variable.path
        for variable in model.weights
        if isinstance(variable, StoredVariable)
    }
    kpe.thaw(model)
    expected = tiny.logits(model, tiny.tokens())
    assert readers.sqnr_db(expected, received) > 100


def values(model):
    return {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}


def paths(written):
    return written.path.split(", ")


def test_layers_in_float_are_ignored_by_the_reader(tmp_path):
    model = in_floats("llama")
    kpe.freeze(model, exclude=[HEAD, "layer_1/.*query", "_0/.*gate"])
    report = kpe.export(model, tmp_path / "folder", exclude="_0/.*value")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [
        "lm_head",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert sum(w.quantized for w in report.weights) == 11
    assert_same_logits(model, tmp_path / "folder")


def assert_same_logits(model, folder, dtype=torch.float32, least=100):
    ids = tiny.successors(8, tiny.LENGTH, seed=99)
    received = readers.logits(readers.read(folder, dtype), ids)
    assert readers.sqnr_db(tiny.logits(model, ids), received) > least


def test_names_of_ignored_layers_of_a_model_made_for_more(tmp_path):
    model = in_floats("qwen3_5")
    kpe.freeze(model, exclude=[HEAD, "layer_1/.*query", "intermediate"])
    kpe.export(model, tmp_path / "folder")
    assert_same_logits(model, tmp_path / "folder")


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_embeddings_are_written_dequantized(tied, tmp_path):
    model = trained("llama", tied=tied)
    kpe.freeze(model)
    report = kpe.export(model, tmp_path / "folder")
    kinds = {w.name: w.dtype for w in report.weights}
    assert kinds["model.embed_tokens.weight"] == "float32"
    assert ("lm_head.weight" in kinds) != tied
    assert_same_logits(model, tmp_path / "folder")


def test_blocks_that_the_reader_would_misread_are_in_float(tmp_path):
    model = in_floats("llama", width=256, inner=192)
    report = kpe.export(model, tmp_path / "folder", "fp8")
    reasons = {w.name: w.reason for w in report.weights}
    assert "192" in reasons["model.layers.0.mlp.up_proj.weight"]
    assert "192" in str(report)
    assert not reasons["model.layers.0.self_attn.q_proj.weight"]
    kpe.freeze(model, granularity="block", exclude=[HEAD, "feedforward"])
    assert_same_logits(model, tmp_path / "folder")


def test_blocks_that_are_not_whole(tmp_path):
    model = trained("llama", width=160, inner=200)
    kpe.freeze(model, granularity="block", exclude=HEAD)
    kpe.export(model, tmp_path / "folder")
    assert_same_logits(model, tmp_path / "folder")


@pytest.mark.parametrize("format", ["compressed-tensors", "fp8"])
def test_sixteen_bits(format, tmp_path):
    model = trained("gemma", dtype="bfloat16")
    kpe.freeze(
        model,
        granularity="tensor" if format == "fp8" else "channel",
        exclude=HEAD,
    )
    kpe.export(model, tmp_path / "folder", format)
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert_same_logits(model, tmp_path / "folder", torch.bfloat16, 25)


def test_several_files(tmp_path):
    model = trained("llama")
    kpe.freeze(model, exclude=HEAD)
    kpe.export(model, tmp_path / "folder", max_shard_size=8000)
    files = sorted(p.name for p in (tmp_path / "folder").glob("*.safetensors"))
    assert len(files) > 3
    assert_same_logits(model, tmp_path / "folder")
    assert_same_logits(
        kpe.load_quantized(tmp_path / "folder"), tmp_path / "folder"
    )


def test_adapters_are_merged(tmp_path):
    model = in_floats("llama")
    kpe.freeze(model, exclude=HEAD)
    frozen = tiny.logits(model, tiny.tokens())
    model.backbone.enable_lora(2)
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        if "lora" in variable.path:
            variable.assign(rng.normal(size=variable.shape) / 4)
    adapted = tiny.logits(model, tiny.tokens())
    kpe.export(model, tmp_path / "folder")
    reader = readers.read(tmp_path / "folder")
    received = readers.logits(reader, tiny.tokens())
    # Adapters move the logits further than merged kernels are rounded.
    moved = readers.sqnr_db(frozen, adapted)
    rounded = readers.sqnr_db(adapted, received)
    print(f"moved {moved:.1f} dB, rounded {rounded:.1f} dB")
    assert moved < 15
    assert rounded > 20


def test_the_library_reads_the_files(tmp_path):
    model = trained("llama")
    kpe.freeze(model)
    kpe.export(model, tmp_path / "folder")
    kpe.export(model, tmp_path / "plain.safetensors", "safetensors")
    for path in (
        tmp_path / "folder" / "model.safetensors",
        tmp_path / "plain.safetensors",
    ):
        with safe_open(path, "pt") as file:
            names = file.keys()
            kinds = {file.get_tensor(name).dtype for name in names}
        assert torch.float8_e4m3fn in kinds
        assert torch.float32 in kinds


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt2", {"activations": "dynamic"}, "Conv1D"),
        ("gpt2", {"format": "fp8"}, "Conv1D"),
        ("gpt2", {"granularity": "block"}, "'channel', 'tensor'"),
        ("llama", {"format": "fp8", "granularity": "channel"}, "'block'"),
        ("llama", {"format": "modelopt"}, "freeze"),
        ("llama", {"activations": "static"}, "freeze"),
        ("llama", {"weights": "float8_e5m2"}, "float8_e4m3fn"),
        ("llama", {"max_shard_size": "many"}, "5GB"),
    ],
)
def test_what_no_reader_takes_is_refused(name, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        kpe.export(tiny.FAMILIES[name](), tmp_path / "folder", **options)
    assert not list(tmp_path.iterdir())


def test_models_that_hugging_face_has_otherwise_are_refused(tmp_path):
    backbone = tiny.hub.GemmaBackbone(
        vocabulary_size=8,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        head_dim=4,
    )
    with pytest.raises(ValueError, match="num_key_value_heads=2"):
        kpe.export(backbone, tmp_path / "folder")
    bert = tiny.hub.BertBackbone(
        vocabulary_size=8,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
    )
    with pytest.raises(TypeError, match="BertBackbone"):
        kpe.export(bert, tmp_path / "folder")


def test_a_map_in_another_order_is_refused(monkeypatch, tmp_path):
    exporter = pytest.importorskip(
        "keras_hub.src.utils.transformers.export.hf_exporter"
    )
    stock = exporter.MODEL_EXPORTERS["Llama3Backbone"]

    def changed(backbone, **options):
        found = stock(backbone, **options)
        name = "model.layers.1.self_attn.o_proj.weight"
        return {**found, name: keras.ops.transpose(found[name])}

    monkeypatch.setitem(exporter.MODEL_EXPORTERS, "Llama3Backbone", changed)
    model = tiny.randomized(tiny.llama())
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj"):
        kpe.export(model, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_tokenizers_are_written_beside_the_weights(tmp_path):
    letters = "abcdefgh"
    vocabulary = ["<|endoftext|>", *letters, "ab", "abc"]
    tokenizer = tiny.hub.GPT2Tokenizer(
        vocabulary={token: n for n, token in enumerate(vocabulary)},
        merges=["a b", "ab c"],
    )
    model = tiny.gpt2()
    kpe.export(model, tmp_path / "without")
    assert not (tmp_path / "without" / "vocab.json").exists()
    kpe.export(model, tmp_path / "folder", tokenizer=tokenizer)
    read = readers.transformers.AutoTokenizer.from_pretrained(
        tmp_path / "folder"
    )
    assert read("abcda").input_ids == list(tokenizer("abcda"))
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["eos_token_id"] == 0

    preprocessor = tiny.hub.GPT2CausalLMPreprocessor(tokenizer, 8)
    task = tiny.hub.GPT2CausalLM(model.backbone, preprocessor)
    kpe.export(task, tmp_path / "of_the_task")
    files = sorted(p.name for p in (tmp_path / "folder").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "of_the_task").iterdir())


def test_an_error_leaves_the_folder_that_was_there(tmp_path, monkeypatch):
    model = tiny.randomized(tiny.llama())
    kpe.export(model, tmp_path / "folder")
    before = (tmp_path / "folder" / "model.safetensors").read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        kpe.export(model, tmp_path / "folder", "fp8", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    after = (tmp_path / "folder" / "model.safetensors").read_bytes()
    assert before == after


@pytest.mark.parametrize(
    ("inputs", "include", "noted"),
    [
        ("dynamic", ".*", True),
        ("dynamic", None, False),
        (None, None, False),
    ],
)
def test_the_report_says_where_the_reader_has_floats(
    inputs, include, noted, tmp_path
):
    model = tiny.llama()
    kpe.freeze(model, activations=inputs, include=include)
    report = kpe.export(model, tmp_path / "folder")
    assert ("logits in floats" in " ".join(report.notes)) == noted
