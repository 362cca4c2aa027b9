"""Pooling: the members of a role become the mean of their factors, again and again, and go on from there.

    factors of a role's members --compute_mean--> one adapter --write--> each of these members

Members learn apart for `pool_every` optimizer steps, and then share what they have learned, as the workers of local
SGD do (DiLoCo, arXiv 2311.08105). They begin with the same A. So the mean of their factors adds to the base
nearly the mean of what the members add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from transformers import TrainerCallback

from trl_populora.population.factors import Factors, compute_product_norms, pair_factors
from trl_populora.population.members import ROLES, Population


POOLS = ("students", "teachers", "both")


def find_pooled_roles(pool: str) -> tuple[str, ...]:
    """Finds the roles that a value of the option `pool` names."""
    return tuple(role for role in ROLES if pool in (f"{role}s", "both"))


def compute_mean(members: Sequence[Factors]) -> Factors:
    """Computes the mean of factors with the same keys and shapes. The mean of equal factors is these factors."""
    mean = {}
    for key, first in members[0].items():
        # In fp64 a sum of equal fp32 numbers is exact, and all hardware rounds additions and the division alike.
        total = first.double()
        for other in members[1:]:
            total = total + other[key].double()
        mean[key] = (total / len(members)).to(first.dtype)
    return mean


def measure_distance(members: Sequence[Factors], mean: Factors) -> float:
    """
    Measures how far members are from their mean.

    The update of an adapter is the product B A. `mean` has the mean of the members' A and the mean of their B.

    Returns:
        The norm of the difference between a member's update and the mean's, as a root mean square over the members,
        divided by the norm of the mean's update. NaN if the mean's update is zero.
    """
    norm = float(compute_product_norms(mean).norm())
    squares = [float(compute_product_norms(_subtract(each, mean)).square().sum()) for each in members]
    return math.sqrt(fmean(squares)) / norm if norm else math.nan


def _subtract(one: Factors, other: Factors) -> Factors:
    """Makes factors of twice the rank, whose product is the difference of two updates."""
    found = {}
    for down, up in pair_factors(one):
        # BA - B'A' = (B - B')A + B'(A - A'): nearly equal factors are subtracted before anything is multiplied.
        found[down] = torch.cat([one[down], one[down] - other[down]])
        found[up] = torch.cat([one[up] - other[up], other[up]], dim=1)
    return found


class PoolingCallback(TrainerCallback):
    """
    Sets the members of each pooled role to the mean of their factors, after every `every`-th optimizer step.

    Like evolution it waits until the next step begins, so that members are evaluated and saved as they were trained.
    Each member keeps its optimizer state, its age and its version. The members are equal then, so each gets the mean
    of their ratings.

    All ranks hold the same members and compute the same mean.

    Args:
        every: Optimizer steps between two poolings.
        roles: Roles whose members are pooled, each role by itself.
        population: The members.
        read: Takes a member's name, returns its factors. Collective.
        write: Takes a member's name and factors, and overwrites the weights alone. Collective.
        log: Takes the metrics of each step.
    """

    def __init__(
        self,
        every: int,
        roles: Sequence[str],
        population: Population,
        read: Callable[[str], Factors],
        write: Callable[[str, Factors], None],
        log: Callable[[Mapping[str, float]], None],
    ):
        self.every, self.roles, self.population = every, roles, population
        self.read, self.write, self.log = read, write, log

    def on_step_begin(self, args, state, control, **kwargs):
        due = state.global_step and state.global_step % self.every == 0
        # Every step logs the same keys, so a step without pooling has values, too.
        self.log({f"pool/{role}/distance": self.pool(role) if due else math.nan for role in self.roles})

    def pool(self, role: str) -> float:
        """Pools a role. Returns how far its members were from their mean ([`measure_distance`]). Collective."""
        members = self.population.role(role)
        factors = [self.read(member.name) for member in members]
        mean = compute_mean(factors)
        mu, sigma = fmean(member.mu for member in members), fmean(member.sigma for member in members)
        for member in members:
            self.write(member.name, mean)
            member.mu, member.sigma = mu, sigma
        return measure_distance(factors, mean)
