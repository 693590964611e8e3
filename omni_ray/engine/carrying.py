"""Modules of a codec's decoder that look back, and carry what they look at from one call to the next.

Drop-in replacements of upstream's causal convolutions and attention: same weights under the same names. A call is a
*step* of several requests (rows) of different age and length; what it reads and leaves is in a ``Scope``, so the
modules themselves hold nothing of any request.

Shapes: B rows (requests), n frames of the longest row, C channels, T positions of a layer in time.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from omni_ray.engine.rotary import rotate

_TIME: Final = 2
"""Dimension of time in what is carried: inputs [B, C, T], keys and values [B, heads, T, head_dim]."""


@dataclass(frozen=True, slots=True)
class Past:
    """What is carried of one request. Never changed, only replaced, so a step that fails leaves no trace.

    Attributes:
        frames: decoded so far.
        keys_values: of each attention the last ``window - 1`` positions, zeros before the first, flat.
        inputs: of each convolution the inputs that its next output reaches back to, zeros before the first, flat.
    """

    frames: int
    keys_values: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """One carried tensor inside a flat row: [channels, keep], or [channels, keep, head_dim].

    Attributes:
        start: where it begins.
        channels, keep, head_dim: its shape; for keys and values ``channels`` are heads, for inputs ``head_dim`` is 1.
        rate: positions per frame in this layer.
        early: positions before the request's first that this layer computes in the first call; they mean nothing.
    """

    start: int
    channels: int
    keep: int
    head_dim: int = 1
    rate: int = 1
    early: int = 0

    @property
    def size(self) -> int:
        """Numbers it takes."""
        return self.channels * self.keep * self.head_dim


class Carried:
    """Flat rows of one kind of past during a step: hands out what was before, collects what comes after."""

    def __init__(self, rows: Tensor, new_frames: Tensor, first: Tensor) -> None:
        """Start a step.

        Args:
            rows: [B, size].
            new_frames: int64 [B], frames of each row in this step; the rest of the row is padding.
            first: bool [B], rows that are in their first step.
        """
        self._rows = rows
        self._new_frames = new_frames
        self._first = first
        self._after: list[Tensor] = []

    def extend(self, place: Place, new: Tensor) -> Tensor:
        """``new`` [B, channels, T, ...] with the past in front of it; what the next step needs is kept."""
        shape = (len(new), place.channels, place.keep, *new.shape[3:])
        whole = torch.cat([self._rows[:, place.start : place.start + place.size].view(shape), new], _TIME)
        self._keep(place, whole)
        return whole

    def complete(self, place: Place, whole: Tensor) -> None:
        """As ``extend``, in place: ``whole`` [B, channels, keep + T] has room for the past in front of what is new."""
        before = self._rows[:, place.start : place.start + place.size]
        whole[:, :, : place.keep] = before.view(len(whole), place.channels, place.keep)
        self._keep(place, whole)

    def _keep(self, place: Place, whole: Tensor) -> None:
        if place.early:  # upstream has zeros there: its padding
            whole[:, :, place.keep : place.keep + place.early].masked_fill_(self._first[:, None, None], 0)
        kept = self._new_frames[:, None] * place.rate + torch.arange(place.keep, device=whole.device)
        index = kept.view(len(whole), 1, place.keep, *(1 for _ in whole.shape[3:]))
        self._after.append(torch.take_along_dim(whole, index, _TIME).flatten(1))

    def after(self) -> Tensor:
        """[B, size]; complete once every carrier had its turn, in the order of their places."""
        return torch.cat(self._after, 1)


@dataclass(slots=True)
class Scope:
    """What the carrying modules read; set for the duration of one step, in the one thread that decodes."""

    inputs: Carried | None = None
    keys_values: Carried | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    visible: Tensor | None = None


class CarryingConv(nn.Module):
    """A causal convolution of stride 1 whose left padding is the end of the last call's input instead of zeros."""

    def __init__(self, conv: nn.Conv1d, scope: Scope, place: Place) -> None:
        """Take over a convolution without padding of its own."""
        super().__init__()
        self.conv = conv
        self.place = place
        self._scope = scope

    def complete(self, whole: Tensor) -> None:
        """See ``Carried.complete``."""
        assert self._scope.inputs is not None
        self._scope.inputs.complete(self.place, whole)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] -> [B, C', T]."""
        assert self._scope.inputs is not None
        out: Tensor = self.conv(self._scope.inputs.extend(self.place, hidden))
        return out


class CarryingTransConv(nn.Module):
    """A transposed convolution of kernel 2 * stride that starts one input back: [B, C, T] -> [B, C', T * stride].

    An input adds to the stride of outputs that it stands at and to the one after. So the last stride of a call is not
    final and is cut off; it comes with the next call, which has this call's last input in front of its own.
    """

    def __init__(self, conv: nn.ConvTranspose1d, scope: Scope, place: Place) -> None:
        super().__init__()
        self.conv = conv
        self._stride: int = conv.stride[0]
        self._scope = scope
        self._place = place

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] -> [B, C', T * stride]."""
        assert self._scope.inputs is not None
        out: Tensor = self.conv(self._scope.inputs.extend(self._place, hidden))
        return out[..., self._stride : out.shape[-1] - self._stride].contiguous()


class CarryingAttention(nn.Module):
    """Sliding-window attention over the keys and values of the frames before, at each row's own position.

    Differs from upstream also in that mask and rotary tables come from the step, because its rows differ in age.
    """

    def __init__(self, upstream: Any, scope: Scope, key: Place, value: Place) -> None:
        super().__init__()
        self.q_proj, self.k_proj = upstream.q_proj, upstream.k_proj
        self.v_proj, self.o_proj = upstream.v_proj, upstream.o_proj
        self._head_dim: int = upstream.head_dim
        self._scale: float = upstream.scaling
        self._grouped = upstream.num_key_value_groups > 1
        self._scope = scope
        self._key, self._value = key, value

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[B, n, hidden] -> [B, n, hidden]; the other arguments of upstream's are not needed."""
        scope = self._scope
        assert scope.keys_values is not None
        assert scope.rotary is not None
        shape = (*hidden_states.shape[:2], -1, self._head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *scope.rotary), rotate(key, *scope.rotary)
        key, value = scope.keys_values.extend(self._key, key), scope.keys_values.extend(self._value, value)
        seen = scaled_dot_product_attention(
            query, key, value, attn_mask=scope.visible, scale=self._scale, enable_gqa=self._grouped
        )
        return self.o_proj(seen.transpose(1, 2).flatten(2)), None


@dataclass(slots=True)
class Layout:
    """Gives out the places of a flat row, while modules are walked in the order in which they run.

    Attributes:
        size: of the row so far.
        rate, early: of the layer that has been reached; see ``Place``.
    """

    size: int = 0
    rate: int = 1
    early: int = 0

    def next(self, channels: int, keep: int, head_dim: int = 1) -> Place:
        """The place after the last one."""
        place = Place(self.size, channels, keep, head_dim, self.rate, self.early)
        self.size += place.size
        return place
