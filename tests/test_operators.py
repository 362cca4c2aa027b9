"""Operators against references computed here in float64 on the dense products, and their properties by hypothesis."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_populora.population.factors import compare, compute_product_norms
from trl_populora.population.operators import (
    CROSSOVERS,
    MUTATIONS,
    average,
    component_mask,
    dare,
    extrapolate,
    full_gaussian,
    layer_gaussian,
    module_swap,
    rotation,
    slerp,
    svd_perturb,
    svd_subspace,
    ties,
)


# Operators that keep each module's norm at the parents' mean; the others keep parts of parents as they are.
ON_THE_PRODUCT = ["dare", "svd_subspace", "extrapolate", "average", "ties", "slerp"]
KEEP_NORM = ["svd_perturb", "layer_gaussian", "full_gaussian", *ON_THE_PRODUCT]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_adapter(seed, shapes=((12, 9), (7, 15), (12, 9)), rank=4, dtype=torch.float32, live_rank=None):
    """Random factors of modules with `shapes` (out, in); only `live_rank` of the `rank` components are not zero."""
    torch.manual_seed(seed)
    factors = {}
    for index, (out, inputs) in enumerate(shapes):
        down, up = torch.randn(rank, inputs), torch.randn(out, rank)
        if live_rank is not None:
            down, up = down.clone(), up.clone()
            up[:, live_rank:] = 0
        key = f"base_model.model.model.layers.{index}.self_attn.q_proj"
        factors[f"{key}.lora_A.weight"] = down.to(dtype)
        factors[f"{key}.lora_B.weight"] = up.to(dtype)
    return factors


def products(factors) -> list[np.ndarray]:
    """Dense updates B A in float64."""
    keys = [key for key in factors if "lora_A" in key]
    return [factors[key.replace("lora_A", "lora_B")].double().numpy() @ factors[key].double().numpy() for key in keys]


def apply(name, first, second, seed=0, **options):
    if name in MUTATIONS:
        return MUTATIONS[name](first, generator(seed), **options)
    return CROSSOVERS[name](first, second, generator(seed), **options)


def truncated(matrix: np.ndarray, rank: int) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def with_norm(matrix: np.ndarray, norm: float) -> np.ndarray:
    return matrix * (norm / np.linalg.norm(matrix))


def mean_norm(*matrices: np.ndarray) -> float:
    return float(np.mean([np.linalg.norm(matrix) for matrix in matrices]))


def assert_products(child, references, tolerance=2e-5):
    for got, expected in zip(products(child), references, strict=True):
        np.testing.assert_allclose(got, expected, atol=tolerance * max(1.0, np.linalg.norm(expected)))


adapters = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "shapes": st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=3).map(tuple),
        "rank": st.integers(1, 8),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)
property_test = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", [*MUTATIONS, *CROSSOVERS])
class TestEveryOperator:
    @property_test
    @given(shape=adapters, first_rank=st.integers(0, 8), second_rank=st.integers(0, 8), strength=st.floats(0.01, 1.5))
    def test_child_is_finite_with_the_parents_keys_shapes_and_dtypes(
        self, name, shape, first_rank, second_rank, strength
    ):
        first = make_adapter(**shape, live_rank=min(first_rank, shape["rank"]))
        second = make_adapter(**shape | {"seed": shape["seed"] + 1}, live_rank=min(second_rank, shape["rank"]))
        before = {key: value.clone() for key, value in first.items()}
        child = apply(name, first, second, strength=strength)
        assert list(child) == list(first)
        for key, value in child.items():
            assert value.shape == first[key].shape
            assert value.dtype == first[key].dtype
            assert torch.isfinite(value).all()
            assert value.data_ptr() != first[key].data_ptr()
            assert torch.equal(first[key], before[key])

    @property_test
    @given(shape=adapters, seed=st.integers(0, 2**40))
    def test_same_seed_same_child_and_the_global_generator_is_left_alone(self, name, shape, seed):
        first, second = make_adapter(**shape), make_adapter(**shape | {"seed": shape["seed"] + 1})
        state = torch.get_rng_state()
        one = apply(name, first, second, seed)
        torch.manual_seed(seed + 1)
        two = apply(name, first, second, seed)
        torch.set_rng_state(state)
        assert all(torch.equal(one[key], two[key]) for key in one)

    @property_test
    @given(shape=adapters, live=st.integers(0, 8))
    def test_strength_zero_is_the_better_parent(self, name, shape, live):
        first = make_adapter(**shape, live_rank=min(live, shape["rank"]))
        second = make_adapter(**shape | {"seed": shape["seed"] + 1})
        child = apply(name, first, second, strength=0.0)
        assert all(torch.equal(child[key], first[key]) for key in first)
        assert all(child[key] is not first[key] for key in first)

    def test_a_small_strength_stays_near_the_better_parent(self, name):
        shapes = ((30, 25),) * 12
        first, second = make_adapter(1, shapes, 8), make_adapter(2, shapes, 8)
        likeness = [compare(apply(name, first, second, strength=s), first)["cosine"] for s in (1.0, 0.25, 0.01)]
        assert likeness[2] > 0.99
        if name != "clone":
            assert likeness[0] < likeness[1] <= likeness[2]

    def test_zero_adapters_breed_zero_products_that_can_still_learn(self, name):
        # A fresh LoRA: B is zero, and A must stay alive or neither factor would ever get a gradient.
        first, second = make_adapter(1, live_rank=0), make_adapter(2, live_rank=0)
        child = apply(name, first, second)
        assert all((product == 0).all() for product in products(child))
        for key, value in child.items():
            if "lora_A" in key:
                assert torch.linalg.matrix_rank(value) == value.shape[0]

    @pytest.mark.parametrize("live_rank", [1, 3])
    def test_rank_deficient_parents_keep_live_rows(self, name, live_rank):
        child = apply(name, make_adapter(1, live_rank=live_rank), make_adapter(2, live_rank=live_rank))
        for key, value in child.items():
            if "lora_A" in key:
                assert torch.linalg.matrix_rank(value) == value.shape[0]

    @pytest.mark.parametrize("strength", [-0.5, math.nan])
    def test_an_impossible_strength_is_refused(self, name, strength):
        with pytest.raises(ValueError, match="strength"):
            apply(name, make_adapter(1), make_adapter(2), strength=strength)


@pytest.mark.parametrize("name", [*MUTATIONS, *CROSSOVERS])
def test_modules_of_other_ranks_are_bred_as_if_alone(name):
    """`rank_pattern` gives modules ranks of their own."""
    parents = [make_adapter(seed, shapes=((12, 9),), rank=2) for seed in (1, 2)]
    wide = [make_adapter(seed, shapes=((12, 9),), rank=8) for seed in (3, 4)]
    both = [small | {key.replace("layers.0", "layers.1"): value for key, value in large.items()}
            for small, large in zip(parents, wide, strict=True)]  # fmt: skip
    child = apply(name, *both)
    for rank, key in ((2, "layers.0"), (8, "layers.1")):
        (module,) = (p for p in products({k: v for k, v in child.items() if key in k}))
        full = np.linalg.matrix_rank(module, tol=1e-4)
        assert full == (rank if name != "component_mask" else round(rank * 0.7))


@pytest.mark.parametrize("name", KEEP_NORM)
class TestNorm:
    @property_test
    @given(shape=adapters, size=st.floats(0.1, 10))
    def test_module_norms_are_the_parents_mean(self, name, shape, size):
        first, second = make_adapter(**shape), make_adapter(**shape | {"seed": shape["seed"] + 1})
        second = {key: value * size if "lora_B" in key else value for key, value in second.items()}
        child = compute_product_norms(apply(name, first, second))
        parents = [first] if name in MUTATIONS else [first, second]
        target = sum(map(compute_product_norms, parents)) / len(parents)
        # Zero is a legal child of parents that cancel each other; hypothesis finds rank-1 products of 1 x 1 modules.
        kept = child > 0
        torch.testing.assert_close(child[kept], target[kept], rtol=0.02, atol=1e-6)

    def test_a_weak_operator_stays_near_the_better_parents_norm(self, name):
        first, second = make_adapter(1), make_adapter(2)
        second = {key: value * 4 if "lora_B" in key else value for key, value in second.items()}
        child = compute_product_norms(apply(name, first, second, strength=0.02))
        torch.testing.assert_close(child, compute_product_norms(first), rtol=0.05, atol=0)

    def test_norm_keeping_can_be_switched_off(self, name):
        first, second = make_adapter(1), make_adapter(2)
        kept, free = (compute_product_norms(apply(name, first, second, keep_norm=keep)) for keep in (True, False))
        assert not torch.allclose(kept, free, rtol=1e-4)


class TestMutations:
    def test_rotation_is_the_matrix_exponential_and_orthogonal(self):
        noise = torch.randn(3, 16, 16, generator=generator())
        turned = rotation(noise, 0.7)
        for got, raw in zip(turned.numpy(), noise.double().numpy(), strict=True):
            expected = scipy.linalg.expm((raw - raw.T) / math.sqrt(2) * 0.7 / math.sqrt(16))
            np.testing.assert_allclose(got, expected, atol=1e-12)
            np.testing.assert_allclose(got @ got.T, np.eye(16), atol=1e-12)

    @pytest.mark.parametrize("rank", [4, 16, 64])
    def test_rotation_turns_as_far_at_every_rank(self, rank):
        turned = rotation(torch.randn(200, rank, rank, generator=generator()), 0.1)
        angle = torch.acos(torch.diagonal(turned, dim1=-2, dim2=-1).clamp(-1, 1))
        assert float(angle.square().mean().sqrt()) == pytest.approx(0.1, rel=0.15)

    def test_svd_perturb_moves_singular_values_by_the_drawn_factors_within_the_same_spaces(self):
        parent = make_adapter(3, ((40, 30),), rank=6)
        child = svd_perturb(parent, generator(5), scale=0.2, keep_norm=False)
        replay = generator(5)
        for _ in range(2):
            torch.randn(1, 6, 6, generator=replay)
        factors = np.exp(0.2 * torch.randn(1, 6, generator=replay)[0].double().numpy())
        (before,), (after,) = products(parent), products(child)
        left, values, right = np.linalg.svd(before)
        expected = np.sort(values[:6] * factors)[::-1]
        np.testing.assert_allclose(np.linalg.svd(after, compute_uv=False)[:6], expected, rtol=1e-5)
        np.testing.assert_allclose(left[:, :6] @ left[:, :6].T @ after @ right[:6].T @ right[:6], after, atol=1e-4)

    @pytest.mark.parametrize("rank", [8, 32])
    def test_svd_perturb_is_milder_than_the_first_order_rotation(self, rank):
        # FACTS: I + 0.1 skew gives cosine 0.86 at rank 32.
        parent = make_adapter(1, ((128, 96),), rank)
        assert compare(svd_perturb(parent, generator(), scale=0.1), parent)["cosine"] > 0.97

    @pytest.mark.parametrize("seed", range(4))
    def test_component_mask_keeps_the_other_components_exactly(self, seed):
        parent = make_adapter(seed, ((20, 16),), rank=10)
        (before,), (after,) = products(parent), products(component_mask(parent, generator(seed)))
        left, values, right = np.linalg.svd(before, full_matrices=False)
        coefficients = left[:, :10].T @ after @ right[:10].T
        np.testing.assert_allclose(coefficients, np.diag(np.diag(coefficients)), atol=1e-4)
        kept = np.abs(np.diag(coefficients)) > 1e-4
        assert kept.sum() == 7
        np.testing.assert_allclose(np.diag(coefficients), values[:10] * kept, atol=1e-4)

    def test_layer_gaussian_changes_a_third_of_the_modules_and_keeps_the_others_exactly(self):
        parent = make_adapter(1, ((6, 5),) * 9)
        child = layer_gaussian(parent, generator())
        changed = [
            any(not torch.equal(child[k], parent[k]) for k in (a, a.replace("lora_A", "lora_B")))
            for a in parent
            if "lora_A" in a
        ]
        assert sum(changed) == 3

    def test_full_gaussian_is_noise_relative_to_each_tensor(self):
        parent = make_adapter(1, ((200, 150), (90, 180)), rank=16)
        parent = {key: value * (100 if "layers.1" in key else 0.01) for key, value in parent.items()}
        child = full_gaussian(parent, generator(2), scale=0.3, keep_norm=False)
        for key, value in child.items():
            relative = (value - parent[key]).square().mean().sqrt() / parent[key].square().mean().sqrt()
            assert float(relative) == pytest.approx(0.3, rel=0.1)
        # Independent noise on both factors: cosine 1 / (1 + scale^2).
        assert compare(child, parent)["cosine"] == pytest.approx(1 / 1.09, abs=0.01)


class TestCrossovers:
    first, second = make_adapter(11, ((22, 17), (9, 30)), rank=5), make_adapter(12, ((22, 17), (9, 30)), rank=5)

    def reference(self, mix):
        """Truncation of `mix(W1, W2)` at the mean norm."""
        pairs = zip(products(self.first), products(self.second), strict=True)
        return [with_norm(truncated(mix(a, b), 5), mean_norm(a, b)) for a, b in pairs]

    def test_average(self):
        child = average(self.first, self.second, generator())
        assert_products(child, self.reference(lambda a, b: (a + b) / 2))

    def test_extrapolate(self):
        factor = 1 + 0.5 * float(torch.rand((), generator=generator(4)))
        child = extrapolate(self.first, self.second, generator(4))
        assert_products(child, self.reference(lambda a, b: b + factor * (a - b)))

    @pytest.mark.parametrize("size", [0.0, 1e-4, 0.1])
    def test_extrapolate_never_turns_against_a_larger_worse_parent(self, size):
        """Beyond a better parent that hardly does anything lies no more than that."""
        small = {key: value * size if "lora_B" in key else value for key, value in self.first.items()}
        for seed in range(5):
            child = extrapolate(small, self.second, generator(seed), keep_norm=False)
            difference = [child - parent for child, parent in zip(products(child), products(small), strict=True)]
            for moved, norm in zip(difference, compute_product_norms(small), strict=True):
                assert np.linalg.norm(moved) <= 1.01 * float(norm)
        if not size:
            assert float(compute_product_norms(extrapolate(small, self.second, generator())).sum()) == 0

    @pytest.mark.parametrize("name", ["average", "slerp"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nothing_is_left_of_opposite_parents(self, name, dtype):
        """However the second is factored: what is left of the two is rounding, and stays small."""
        first = {key: value.to(dtype) for key, value in self.first.items()}
        turn = torch.linalg.qr(torch.randn(5, 5, generator=generator(3)))[0]
        for mix in (torch.eye(5), turn):
            opposite = {
                key: (-value.float() @ mix.T if "lora_B" in key else mix @ value.float()).to(dtype)
                for key, value in first.items()
            }
            child = apply(name, first, opposite)
            assert (compute_product_norms(child) < 0.02 * compute_product_norms(first)).all()
            assert all(value.isfinite().all() for value in child.values())
            assert all(value.any() for key, value in child.items() if "lora_A" in key), "rows that can learn again"

    @pytest.mark.parametrize("name", ["average", "slerp"])
    def test_what_nearly_opposite_parents_share_is_kept_at_their_norm(self, name):
        opposite = {key: -value if "lora_B" in key else value for key, value in self.first.items()}
        shared = {key: value + 0.02 * self.second[key] for key, value in opposite.items()}
        child = apply(name, self.first, shared)
        torch.testing.assert_close(compute_product_norms(child), compute_product_norms(self.first), rtol=0.05, atol=0)

    def test_slerp(self):
        def turn(a, b):
            angle = math.acos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
            return (math.sin(angle / 2) / math.sin(angle)) * (a / np.linalg.norm(a) + b / np.linalg.norm(b))

        assert_products(slerp(self.first, self.second, generator()), self.reference(turn))

    def test_svd_subspace_has_the_betters_top_and_the_others_rest(self):
        def join(a, b):
            left, values, right = np.linalg.svd(b, full_matrices=False)
            return truncated(a, 3) + (left[:, 3:5] * values[3:5]) @ right[3:5]

        child = svd_subspace(self.first, self.second, generator())
        assert_products(child, self.reference(join))

    def test_dare_is_unbiased_around_the_average(self):
        # Over many draws without truncation or norm keeping the mean child is the plain mean of the products.
        wide = [make_adapter(s, ((8, 8),), rank=8) for s in (1, 2)]
        children = [products(dare(*wide, generator(s), keep_norm=False))[0] for s in range(200)]
        expected = (products(wide[0])[0] + products(wide[1])[0]) / 2
        error = np.linalg.norm(np.mean(children, axis=0) - expected) / np.linalg.norm(expected)
        assert error < 0.1
        assert np.linalg.norm(children[0] - expected) / np.linalg.norm(expected) > 0.3

    def test_dare_drops_and_rescales_entries_of_the_difference(self):
        # With orthonormal, complementary factors the cores are visible: dropped entries equal the better parent's.
        parent, other = make_adapter(1, ((8, 8),), rank=8), make_adapter(2, ((8, 8),), rank=8)
        same = dare(parent, parent, generator(3), drop=0.9)
        assert_products(same, products(parent))
        with pytest.raises(ValueError, match="below 1"):
            dare(parent, other, generator(), drop=1.0)

    def test_ties_of_diagonal_parents_is_trim_elect_merge(self):
        # Both parents diagonal in the same singular bases, so the entries are the numbers below. Density 0.5 of the
        # 64 entries trims nothing that is not zero; signs are elected by the sum; agreeing entries are averaged.
        eye = torch.eye(8)
        first = torch.tensor([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
        second = torch.tensor([2.0, -3.0, -9.0, 5.0, 1.0, 1.0, -3.0, 3.0])
        merged = torch.tensor([5.0, 7.0, -9.0, 5.0, 2.5, 2.0, -3.0, 2.0])
        key = "m.lora_{}.weight"
        parents = [{key.format("A"): eye.clone(), key.format("B"): torch.diag(values)} for values in (first, second)]
        child = ties(*parents, generator(), keep_norm=False)
        np.testing.assert_allclose(products(child)[0], torch.diag(merged).double(), atol=1e-4)

    def test_module_swap_takes_each_module_whole(self):
        shapes = ((6, 5),) * 20
        first, second = make_adapter(1, shapes), make_adapter(2, shapes)
        child = module_swap(first, second, generator())
        from_second = 0
        for down in (key for key in first if "lora_A" in key):
            up = down.replace("lora_A", "lora_B")
            swapped = torch.equal(child[down], second[down])
            parent = second if swapped else first
            assert torch.equal(child[down], parent[down])
            assert torch.equal(child[up], parent[up])
            from_second += swapped
        assert 0 < from_second < 20

    @pytest.mark.parametrize("name", ON_THE_PRODUCT)
    def test_the_child_does_not_depend_on_how_a_parent_is_factored(self, name):
        # (B M)(M^-1 A) is the same parent. Factor-wise operators fail this, and so would mix unlike coordinates.
        torch.manual_seed(0)
        twist = torch.randn(5, 5) + 3 * torch.eye(5)
        twisted = {
            key: twist.inverse() @ value if "lora_A" in key else value @ twist for key, value in self.second.items()
        }
        one, two = (apply(name, self.first, second) for second in (self.second, twisted))
        assert_products(one, products(two), tolerance=2e-4)

    @pytest.mark.parametrize("name", ON_THE_PRODUCT)
    def test_equal_parents_breed_true(self, name):
        assert_products(apply(name, self.first, self.first), products(self.first), tolerance=1e-4)

    @pytest.mark.parametrize("name", ON_THE_PRODUCT)
    def test_parents_that_share_most_of_a_are_told_apart(self, name):
        # All members start from one A, so the joint rows of A are nearly dependent: the hard case of the Gram matrix.
        near = {k: self.first[k] + 1e-3 * v if "lora_A" in k else v for k, v in self.second.items()}
        if name == "average":
            child = average(self.first, near, generator())
            pairs = zip(products(self.first), products(near), strict=True)
            assert_products(child, [with_norm(truncated((a + b) / 2, 5), mean_norm(a, b)) for a, b in pairs])
        assert all(torch.isfinite(value).all() for value in apply(name, self.first, near).values())

    @pytest.mark.parametrize("name", ON_THE_PRODUCT)
    def test_parents_with_one_a_and_poor_b_leave_every_row_alive(self, name):
        # Early in a run A has hardly moved: half of the joint row space is dead, and must not serve as null space.
        first, second = make_adapter(1, live_rank=1), make_adapter(2, live_rank=1)
        second = {key: first[key] if "lora_A" in key else value for key, value in second.items()}
        for key, value in apply(name, first, second).items():
            if "lora_A" in key:
                values = torch.linalg.svdvals(value)
                assert float(values[-1]) == pytest.approx(float(values[0]), rel=1e-4)

    def test_the_childs_a_is_near_the_better_parents(self):
        # Inherited optimizer moments and the learning rate refer to these coordinates.
        child = average(self.first, make_adapter(11, ((22, 17), (9, 30)), rank=5), generator())
        for key in (key for key in child if "lora_A" in key):
            ours, theirs = child[key].flatten(), self.first[key].flatten()
            assert float(torch.dot(ours, theirs) / ours.norm() / theirs.norm()) > 0.9
            assert float(ours.norm() / theirs.norm()) == pytest.approx(1, rel=1e-4)


class TestCompare:
    def test_against_dense_products(self):
        first, second = make_adapter(1), make_adapter(2)
        a, b = (np.concatenate([p.ravel() for p in products(f)]) for f in (first, second))
        got = compare(first, second)
        assert got["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-6)
        assert got["norm_ratio"] == pytest.approx(np.linalg.norm(a) / np.linalg.norm(b), rel=1e-6)

    def test_a_zero_parent_has_no_direction(self):
        likeness = compare(make_adapter(1), make_adapter(1, live_rank=0))
        assert all(math.isnan(value) for value in likeness.values())


class TestErrors:
    def test_a_factor_without_its_partner_is_named(self):
        factors = make_adapter(1)
        del factors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.lora_A\.weight.*without its partner"):
            full_gaussian(factors, generator())

    def test_a_key_that_is_no_factor_is_named(self):
        with pytest.raises(ValueError, match="lm_head"):
            full_gaussian(make_adapter(1) | {"lm_head.weight": torch.zeros(3, 3)}, generator())

    def test_parents_of_different_rank_are_refused(self):
        with pytest.raises(ValueError, match=r"\(4, 9\) in one and \(3, 9\)"):
            average(make_adapter(1), make_adapter(2, rank=3), generator())

    def test_parents_of_different_modules_are_refused(self):
        with pytest.raises(ValueError, match="absent in the other"):
            average(make_adapter(1), make_adapter(2, shapes=((12, 9),)), generator())
