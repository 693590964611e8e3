"""Qwen3-Omni: thinker, talker and code2wav, stage by stage what transformers' monolithic model computes."""
