"""Routers of experts stay as they are; `filter="all"` converts them."""

import hub_models as hub
import keras
import keras_hub
import pytest

import keras_policy_ext as kpe
from keras_policy_ext._keras import keras_hub as contact
from keras_policy_ext.conversion import roles
from keras_policy_ext.conversion.candidates import survey
from keras_policy_ext.conversion.traced_model import TracedModel

models = keras_hub.models
SIZES = {
    "vocabulary_size": hub.TOKENS,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 16,
}


def mixtral():
    return models.MixtralBackbone(
        **SIZES, intermediate_dim=32, num_experts=4, top_k=2
    )


def qwen3_moe():
    return models.Qwen3MoeBackbone(
        **SIZES,
        intermediate_dim=32,
        moe_intermediate_dim=32,
        head_dim=8,
        num_experts=4,
        top_k=2,
        norm_top_k_prob=True,
        decoder_sparse_step=1,
    )


def qwen_moe():
    return models.QwenMoeBackbone(
        **SIZES,
        intermediate_dim=32,
        moe_intermediate_dim=32,
        shared_expert_intermediate_dim=32,
        num_experts=4,
        top_k=2,
        norm_top_k_prob=True,
        decoder_sparse_step=1,
    )


def gpt_oss():
    return models.GptOssBackbone(
        **SIZES, intermediate_dim=32, num_experts=4, top_k=2, head_dim=8
    )


def qwen3_5_moe():
    return models.Qwen3_5MoeBackbone(
        **SIZES,
        moe_intermediate_dim=32,
        shared_expert_intermediate_size=32,
        head_dim=8,
        num_experts=4,
        top_k=2,
        layer_types=["full_attention"] * 2,
    )


def gemma4():
    return models.Gemma4Backbone(
        **SIZES,
        image_size=16,
        intermediate_dim=32,
        head_dim=8,
        enable_moe_block=True,
        num_experts=4,
        expert_intermediate_dim=32,
        num_experts_per_token=2,
    )


MAKERS = mixtral, qwen_moe, qwen3_moe, qwen3_5_moe, gpt_oss, gemma4
FAMILIES = {maker.__name__: maker for maker in MAKERS}
ROUTERS = (
    "sparse_feedforward_gate_dense",
    "router_dense",
    "router/proj",
    "router_gate",
)


def routers_of(model):
    return [x for x in hub.layers_of(model) if (x.path or "").endswith(ROUTERS)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_router_stays_unless_all_are_asked_for(name):
    model = FAMILIES[name]()
    paths = {layer.path for layer in routers_of(model)}
    assert len(paths) == 2

    report = kpe.convert(model, "float8/current_from_float32")
    assert not paths & {entry.path for entry in report.converted}
    reasons = [x.reason for x in report.skipped if x.path in paths]
    assert len(reasons) == 2
    for reason in reasons:
        assert reason.startswith("it decides which experts of ")
    printed = " ".join(str(report).split())
    assert "since rounding could change what is chosen: 2 layers" in printed
    assert "`filter='all'` converts such layers too" in printed
    assert {type(layer) for layer in routers_of(model)} == {keras.layers.Dense}

    report = kpe.convert(model, "float8/current_from_float32", filter="all")
    assert {entry.path for entry in report.converted} == paths


@pytest.mark.parametrize("name", FAMILIES)
def test_role_and_class_find_the_same(name, monkeypatch):
    model = FAMILIES[name]()
    found, traced = survey(model).candidates, TracedModel(model)
    by_class = roles.deciding(found, traced)
    monkeypatch.setattr(contact, "routers", lambda model: {})
    by_role = roles.deciding(found, traced)
    assert set(by_role) == set(by_class)
    assert len(by_role) == 2


def test_without_a_trace_the_class_says_it(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no trace")

    model = mixtral()
    monkeypatch.setattr(
        "keras_policy_ext.conversion.traced_model._traced", fail
    )
    report = kpe.convert(model, "float8/current_from_float32")
    left = {entry.path for entry in report.skipped}
    assert {layer.path for layer in routers_of(model)} <= left


def test_the_sampler_of_a_language_model_is_no_choice_of_its_call():
    """Generating takes the likeliest token, by the logits of the head."""
    model = hub.compiled(hub.task("llama"))
    inputs, _ = hub.data("llama")
    model.generate(hub.prompt(inputs), stop_token_ids=None)
    report = kpe.convert(model, "float8/current_from_float32")
    assert "token_embedding" in [e.path for e in report.converted]
    assert all("decides" not in entry.reason for entry in report.skipped)
