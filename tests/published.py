"""Parameter totals of released models: the figures that presets, specs and torch models must come out at."""

from __future__ import annotations

# Llama, Qwen3 and GPT-2: counts of the released weights. GPT-3: 12·96·12288² + biases and norms + 50257 + 2048 rows,
# arXiv 2005.14165 table 2.1 says 175.0 B.
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt3-175b": 174_604_259_328,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352 + 11_610_067_968,  # the main model, and multi-token prediction
}
