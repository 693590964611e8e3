"""What vLLM computes before a stage is ready, so that no request waits for a kernel to be compiled. Imports no vLLM.

vLLM's start compiles what its CUDA graphs and its longest step need. Its kernel of experts (``fused_moe_kernel``) is
compiled anew, for a second or two and while all streams stand still, for each class of sizes of a step
(``try_get_optimal_moe_config``: the nearest of ``TUNED``), and in each class for numbers of tokens that are, times the
experts of a token, multiples of 16 and for others. So the first prompts of some lengths would stall every stream.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from omni_ray.config.sampling import SamplingParams

TUNED: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Sizes that vLLM 0.26's tables of tuned expert kernels have."""

BETWEEN: Final = (6, 15)
"""Where the class of size 4 begins to sort tokens by expert, and where padding is even though the tokens are not."""

TOGETHER: Final = 16
"""Requests of a crowd: vLLM filters 8 rows of probabilities and more with a kernel, multiples of 16 with another."""

CROWD_TOKENS: Final = (4, 8)
"""Half of a crowd leaves sooner, so that it is a multiple of 16 for some steps and none for others."""

IDS_TRIED: Final = 512
"""Token ids of which prompts are made, without the special ones among them: a medium's mark would ask for a medium."""


@dataclass(frozen=True, slots=True)
class WarmUpPrompt:
    """A prompt of ``length`` random tokens that is answered with ``limit`` tokens."""

    length: int
    limit: int
    sampling: SamplingParams


def warm_up_lengths(most: int, captured: int) -> list[int]:
    """Lengths of prompts, each computed alone, that need every variant of the kernel of experts.

    Args:
        most: tokens of a step.
        captured: of the largest CUDA graph that steps with prompts replay: smaller steps are filled up to a graph's
            size, so their kernels are compiled already. 0 for none.
    """
    lengths = {size + more for size in TUNED for more in (0, 1)} | {
        *BETWEEN,
        captured + 1,
        captured + 2,
        most - 1,
        most,
    }
    return sorted(length for length in lengths if captured < length <= most)


def warm_up_steps(lengths: Sequence[int], crowd: int, said: SamplingParams) -> list[list[WarmUpPrompt]]:
    """Prompts of which those of one list are computed together, one list after the other.

    Args:
        lengths: of the prompts that are computed alone.
        crowd: most requests at once; 0 for none together.
        said: sampling that the stage has by default.
    """
    usual = SamplingParams(ignore_eos=True).over(said)
    greedy, drawn, filtered = (
        SamplingParams(temperature=temperature, top_p=top_p).over(usual)
        for temperature, top_p in ((0, 1), (1, 1), (1, 0.9))
    )
    steps = [[WarmUpPrompt(length, 1, greedy)] for length in lengths]
    for sampling in dict.fromkeys((usual, greedy, drawn, filtered)) if crowd else ():
        tokens = [CROWD_TOKENS[index % 2] for index in range(min(TOGETHER, crowd))]
        steps.append([WarmUpPrompt(index + 1, limit, sampling) for index, limit in enumerate(tokens)])
    return steps


class RandomPrompts:
    """Makes prompts that begin like no other one: nothing of them is found in a prefix cache."""

    def __init__(self, bytes_of: Callable[[int], bytes], vocabulary: int) -> None:
        """Choose the ids.

        Args:
            bytes_of: the bytes of a token, none for special ones; see ``VLLMModel.detokenizer``.
            vocabulary: token ids that the model has.
        """
        self._ids = [token for token in range(min(vocabulary, IDS_TRIED)) if bytes_of(token)] or [0]
        self._random = random.Random(0)

    def ids(self, length: int) -> list[int]:
        """Token ids [length]."""
        return self._random.choices(self._ids, k=length)
