"""What something takes at each member of a fleet, learned while it is measured: a shape and a speed.

A member's prediction is scale * (shape . features). The scale is its speed, followed quickly and
symmetrically in the logarithm; the shape changes slowly and is fitted, in the unit of that speed, with
relative errors. The shape of the whole fleet is the prior of each member's own, so a new member predicts like
a typical one, and one that is three times slower is known for it after a few observations, also at lengths it
has not seen.

Owns the learning. It does not know what the features mean, and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import mul
from typing import Generic, TypeVar

from router.learning.least_squares import LeastSquares

# An observation's share of a member's scale, once there are more than ten: a change of speed is followed
# within some twenty, and noise of 10 % moves the scale by 2 %.
SCALE_GAIN = 0.1
# What a new member's likeness to the others counts for, in observations of its own.
TYPICAL_COUNT = 0.25
# A measurement further off than this factor is taken for one that is only that far off: one pause of a
# machine teaches little. In the shape, one that is off by the second factor weighs half, and further off ever
# less. Both are wider while the fleet has seen little and the predictions deserve no trust.
OUTLIER_FACTOR = 3.0
SHAPE_FACTOR = 2.0
WIDER_AT_FIRST = 4.0
# So many outliers in a row to one side are no outliers: the speed has changed, and is learned anew.
STREAK = 3
# Weights left by one observation: some 50 count at a member, some 500 in the fleet.
MEMBER_DECAY = 0.98
FLEET_DECAY = 0.998
# The fleet's shape counts as so many of a member's own observations.
FLEET_COUNT = 4.0
# Of the prior that was stated before anything was measured, in observations of the fleet. It keeps its
# weight, so that a shape that cannot be told from the measurements (all prompts of one length) stays like it.
PRIOR_COUNT = 0.1
# A shape is solved again when a sixteenth of what counts in it is new.
SOLVE_SHARE = 16
# A member that is not forgotten when it should be must not cost memory for ever: the one that joined first
# goes.
MAX_MEMBERS = 16_384  # the pairs of 128 workers with 128

Key = TypeVar("Key", bound=Hashable)


class _Member:
    """What is known of one member. outliers: in a row, with the sign of their side."""

    __slots__ = ("coefficients", "gain", "log_scale", "num_fresh", "num_seen", "outliers", "shape", "sums")

    def __init__(self, num_coefficients: int, log_scale: float) -> None:
        self.sums = LeastSquares(num_coefficients, MEMBER_DECAY)
        self.shape: tuple[float, ...] = ()
        self.coefficients: tuple[float, ...] | None = None
        self.log_scale = log_scale
        self.gain = 0.0
        self.num_seen = 0
        self.num_fresh = 0
        self.outliers = 0


class OnlineFit(Generic[Key]):
    """Predictions for the members of a fleet, linear in the features, with coefficients >= 0.

    prior: the coefficients before anything was measured.
    examples: features at which the prior is believed; they tell its coefficients apart.
    floor: above 0, in the unit of what is measured; measurements and predictions below it count as it.
    hint: one coefficient that is roughly known from elsewhere: its index, and at a member (a typical one for
        None) its value, above 0, and for how many of the member's own observations that counts.
    """

    def __init__(
        self,
        prior: Sequence[float],
        examples: Sequence[Sequence[float]],
        *,
        floor: float,
        hint: tuple[int, Callable[[Key | None], tuple[float, float]]] | None = None,
    ) -> None:
        self._floor = floor
        self._hint = hint
        self._members: dict[Key, _Member] = {}
        self._num_coefficients = len(prior)
        self._prior = LeastSquares(len(prior))
        self._fleet = LeastSquares(len(prior), FLEET_DECAY)
        self._num_seen = 0
        self._sum_log_scale = 0.0
        self._typical_log_scale = 0.0
        self._typical: tuple[float, ...] | None = None
        self._typical_shape: tuple[float, ...] = ()
        self._num_fresh = 0
        for features in examples:
            size = _dot(prior, features)
            self._prior.add([x / size for x in features], 1.0, PRIOR_COUNT / len(examples))

    def predict(self, key: Key, features: Sequence[float]) -> float:
        """What is expected at a member, known or not; not rounded up to the floor."""
        return _dot(self.coefficients(key), features)

    def coefficients(self, key: Key | None) -> tuple[float, ...]:
        """One per feature; of a typical member for None and for a member never observed."""
        member = None if key is None else self._members.get(key)
        if member is None:
            return self._typical_coefficients()
        if member.coefficients is None:
            if member.num_fresh * SOLVE_SHARE >= member.sums.count:
                member.shape = self._shape(key, member)
                member.num_fresh = 0
            member.coefficients = _scaled(member.shape, member.log_scale)
        return member.coefficients

    def observe(self, key: Key, features: Sequence[float], measured: float) -> None:
        """Learns one measurement: finite, not negative."""
        measured = max(measured, self._floor)
        predicted = max(self.predict(key, features), self._floor)
        member = self._members.get(key) or self._join(key)
        expected = predicted / math.exp(member.log_scale)
        self._learn_scale(member, math.log(measured / predicted))
        self._learn_shape(member, features, expected, measured / math.exp(member.log_scale))
        self._num_seen += 1
        self._num_fresh += 1
        member.num_seen += 1
        member.num_fresh += 1
        member.coefficients = self._typical = None

    def forget(self, key: Key) -> None:
        """A member is gone; what the fleet learned from it stays."""
        member = self._members.pop(key, None)
        if member is not None:
            self._sum_log_scale -= member.log_scale
            self._update_typical()

    def reconsider(self) -> None:
        """What the hint tells has changed; members observed hear of it with their next observation."""
        self._typical = None

    @property
    def num_seen(self) -> int:
        """Observations ever made."""
        return self._num_seen

    @property
    def members(self) -> list[Key]:
        """Those observed and not forgotten."""
        return list(self._members)

    def _join(self, key: Key) -> _Member:
        if len(self._members) >= MAX_MEMBERS:
            self.forget(next(iter(self._members)))
        member = self._members[key] = _Member(self._num_coefficients, self._typical_log_scale)
        self._sum_log_scale += member.log_scale
        return member

    def _learn_scale(self, member: _Member, deviation: float) -> None:
        """Follows the member's speed. deviation: log(measured / predicted)."""
        believed = self._believed(deviation, OUTLIER_FACTOR)
        side = (deviation > believed) - (deviation < believed)
        member.outliers = side + (member.outliers if member.outliers * side > 0 else 0)
        member.gain = max(SCALE_GAIN, 1 / (member.num_seen + 1 + TYPICAL_COUNT))
        if abs(member.outliers) >= STREAK or self._num_seen == 0:
            member.outliers, member.num_seen, believed, member.gain = 0, 0, deviation, 1.0
        member.log_scale += member.gain * believed
        self._sum_log_scale += member.gain * believed
        self._update_typical()

    def _learn_shape(
        self, member: _Member, features: Sequence[float], expected: float, measured: float
    ) -> None:
        """Both at scale 1. What has told the speed tells nothing of the shape: hence the weight."""
        deviation = math.log(measured / expected)
        weight = (1 - member.gain) / (1 + (deviation / self._bound(SHAPE_FACTOR)) ** 2)
        measured = expected * math.exp(self._believed(deviation, OUTLIER_FACTOR))
        # Relative to the larger of the two, so that what was far too high or far too low weighs alike.
        size = max(expected, measured)
        row = [x / size for x in features]
        member.sums.add(row, measured / size, weight)
        self._fleet.add(row, measured / size, weight)

    def _bound(self, factor: float) -> float:
        return math.log(factor) * (1 + WIDER_AT_FIRST / (1 + self._num_seen / 2))

    def _believed(self, deviation: float, factor: float) -> float:
        bound = self._bound(factor)
        return max(-bound, min(bound, deviation))

    def _update_typical(self) -> None:
        # The geometric mean over the members; the last one where nobody is left.
        if self._members:
            self._typical_log_scale = self._sum_log_scale / len(self._members)
        self._typical = None

    def _typical_coefficients(self) -> tuple[float, ...]:
        if self._typical is None:
            if self._num_fresh * SOLVE_SHARE >= self._fleet.count:
                self._typical_shape = self._shape(None, None)
                self._num_fresh = 0
            self._typical = _scaled(self._typical_shape, self._typical_log_scale)
        return self._typical

    def _shape(self, key: Key | None, member: _Member | None) -> tuple[float, ...]:
        """What fits the member's own observations, the fleet's, the prior and the hint, at scale 1."""
        sums = LeastSquares(self._num_coefficients)
        if member is not None:
            sums.include(member.sums, 1.0)
        share = FLEET_COUNT / (self._fleet.count + self._prior.count)
        sums.include(self._fleet, share)
        sums.include(self._prior, share)
        if self._hint is not None:
            index, (value, count) = self._hint[0], self._hint[1](key)
            x = math.exp(member.log_scale if member else self._typical_log_scale) / value
            # The more was measured of that coefficient, the less counts what is told of it.
            count /= 1 + sums.gram[index][index] / (x * x)
            sums.gram[index][index] += count * x * x
            sums.moment[index] += count * x
        return sums.solution()


def _scaled(shape: Sequence[float], log_scale: float) -> tuple[float, ...]:
    scale = math.exp(log_scale)
    return tuple(scale * coefficient for coefficient in shape)


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    products: Iterable[float] = map(mul, left, right)
    return sum(products)
