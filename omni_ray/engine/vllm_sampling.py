"""Sampling as vLLM is asked for it."""

from collections.abc import Collection

from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import RequestOutputKind

from omni_ray.config.sampling import SamplingParams


def vllm_sampling(said: SamplingParams, seed: int, limit: int, stop_ids: Collection[int]) -> VLLMSamplingParams:
    """What nobody said is OpenAI's default (temperature 1, top_p 1). vLLM ends an answer only where we say.

    Args:
        said: of the request, over all defaults.
        seed: any integer.
        limit: most tokens of the answer.
        stop_ids: tokens that end it.
    """
    return VLLMSamplingParams(
        temperature=1.0 if said.temperature is None else said.temperature,
        top_p=1.0 if said.top_p is None else said.top_p,
        top_k=0 if said.top_k is None else said.top_k,
        repetition_penalty=1.0 if said.repetition_penalty is None else said.repetition_penalty,
        seed=seed % 2**63,
        max_tokens=limit,
        stop_token_ids=[] if said.ignore_eos else sorted(stop_ids),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
