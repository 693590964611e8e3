"""The self-test of ``deterministic: true``: a request's numbers alone equal those in a crowd, on this very machine.

Whether a matmul gives a row the same bits wherever it stands in the batch depends on the machine's BLAS, its vector
width and the number of threads; so it is not assumed but tried, with the engine's own steps.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar_model import PREFILL_CHUNK, Probe
from omni_ray.engine.ar_row import Row, Steps
from omni_ray.engine.types import Request
from omni_ray.errors import ConfigError

STEPS: Final = 3
"""Steps that a probe makes; its feeds must allow them."""


def self_test(stage: str, steps: Steps, slots: int) -> None:
    """Compute the model's probes alone in the first slot, then one in every slot together, and compare all bits.

    Raises:
        ConfigError: a number differs, so this machine cannot keep the promise with these options.
    """
    probes = steps.model.probes()
    if not probes:
        return
    alone = [_run(steps, [probe])[0] for probe in probes]
    crowd = _run(steps, [probes[slot % len(probes)] for slot in range(slots)])
    for slot, numbers in enumerate(crowd):
        for step, (one, many) in enumerate(zip(alone[slot % len(probes)], numbers, strict=True)):
            if not torch.equal(one, many):
                apart = (one.double() - many.double()).abs().max().item()
                raise ConfigError(
                    [
                        f"stage {stage!r}, engine.deterministic: on this machine a request's numbers depend on what"
                        f" runs beside it (slot {slot}, step {step}: {apart:.2g} apart); try other engine.threads or"
                        f" engine.dtype, or switch it off"
                    ]
                )


def _run(steps: Steps, probes: Sequence[Probe]) -> list[list[Tensor]]:
    """Compute probe i in slot i, all together; the numbers behind each of its steps."""
    rows = [_start(steps, slot, probe) for slot, probe in enumerate(probes)]
    numbers: list[list[Tensor]] = [[] for _ in rows]
    for _ in range(STEPS):
        steps.launch(rows)
        for row, own, result in zip(rows, numbers, steps.step(rows), strict=True):
            own.append(steps.evidence(result).clone())
            steps.advance(row, result)
    for row in rows:
        steps.model.release(row.slot)
    return numbers


def _start(steps: Steps, slot: int, probe: Probe) -> Row:
    # Drawn at temperature 1, so that the way of the noise is tried too.
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    row = Row(Request("self-test", seed=1, sampling=sampling), probe.prompt, lambda news: None, slot=slot)
    steps.join(row)
    result = None
    while row.computed < row.length:
        end = min(row.length, (row.computed // PREFILL_CHUNK + 1) * PREFILL_CHUNK)
        result, row.computed = steps.prefill(row, end), end
    steps.prompt_done(row, result)
    for item in probe.feeds:
        steps.feed(row, item)
    return row
