"""Mixtures of ZeroModels: what of their call is in float8, and what decides."""

import pytest
from zeromodels import models

import keras_policy_ext as kpe

_SIZES = {
    "vocab_size": 64,
    "embed_dim": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_DECODER = {**_SIZES, "mlp_dim": 128, "num_kv_heads": 2, "head_dim": 16}
_LATENT = {
    "mlp_dim": 128,
    "moe_mlp_dim": 64,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense": 0,
}

MIXTURES = {
    "mixtral": lambda: models.mixtral.MixtralTextGenerate(**_DECODER),
    "minimax": lambda: models.minimax.MiniMaxTextGenerate(**_DECODER),
    "gpt_oss": lambda: models.gpt_oss.GptOssTextGenerate(**_DECODER),
    "qwen3_next": lambda: models.qwen3_next.Qwen3NextTextGenerate(**_DECODER),
    "deepseek_v3": lambda: models.deepseek_v3.DeepseekV3TextGenerate(
        **_SIZES, **_LATENT
    ),
    "llama4": lambda: models.llama4.Llama4TextGenerate(**_DECODER),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_nearly_all_is_in_float8_and_no_router(family):
    model = MIXTURES[family]()
    report = kpe.convert(model)
    totals = report.totals
    share = totals.multiplications_in_float8 / totals.multiplications
    assert share >= 0.95
    experts = [e for e in report.converted if e.class_name.endswith("Experts")]
    assert experts
    left = [e for e in report.skipped if e.multiplications]
    # One router in each of two blocks, of 64 features for 8 experts.
    routers = [e for e in left if e.reason.startswith("it decides")]
    assert [e.multiplications for e in routers] == [64 * 8] * 2
