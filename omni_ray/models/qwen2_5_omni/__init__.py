"""Qwen2.5-Omni: thinker, talker and token2wav, stage by stage what transformers' monolithic model computes."""
