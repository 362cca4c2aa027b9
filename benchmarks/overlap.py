"""What a step gains because attempts begin as soon as their own proposal has ended, instead of after the last one.

    python benchmarks/overlap.py [--repeats 3] [--clock cpu] [--sizes 16 48 96]
    python benchmarks/overlap.py --only sums                            # without an engine
    python benchmarks/overlap.py --only steps --clock cpu               # real steps alone
    python benchmarks/overlap.py --seven                                # at the shape of Qwen2.5-7B, on a GPU
    python benchmarks/overlap.py --dry-run                              # small; its figures mean nothing
    python benchmarks/overlap.py --record runs/a runs/b > LENGTHS.json  # then: --lengths LENGTHS.json

Replays what runs have written: `overlap_lengths.json` has the tokens of every prompt, proposal and attempt of some
steps, three from each of four runs on the embedded base (4T+4S, 48 proposals and 384 attempts a step). Each becomes a
request to vLLM that gives exactly so many tokens, from its member's adapter; attempts are as many requests as there
are attempts. *In two waves*, as a step is played
where it cannot overlap, all proposals end before the first attempt starts. *Overlapping*, a
proposal's attempts are handed to the running engine when it ends. Nothing is verified in between, so this bounds what
a step can gain. For 16 proposals a step is taken apart, for 96 two are joined. Both ways run in turns on one engine,
after a warm-up, and the ratio is the median over pairs of turns.

*Steps* are real: the embedded base, not trained further, proposes, the sandbox verifies, and the base attempts. Both
ways play the same step from the same state, so they draw the same proposals where vLLM's sampler allows; then lengths
differ by chance, which only repeats even out. A step counts from pairing to ratings, with the sandbox's processes.

On a GPU an iteration of the engine takes nearly as long for few rows as for many, so its time goes by *iterations*
and not by tokens. Those are counted, and worked out for other sequences at a time (`--max-num-seqs`), too, beside the
seconds that a 7B on an H200 would take by the sums of `recipes/budget.py`. The same is worked out for the *long* mix
of `step_at_7b.py`: drawn lengths of 50 to 2048 tokens, in the median 250; and for completions that all end at a limit.

Needs vLLM (on a machine without GPU: `VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1`); no network. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import heapq
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

from budget import GPUS, SHAPES, token_seconds
from step_at_7b import rounded
from step_overhead import CLOCKS
from vs_trl import LONG, draw_length

from trl_populora.step.play import play_step


LENGTHS = Path(__file__).with_name("overlap_lengths.json")
SIZES = (16, 48, 96)
PAIRS = 4  # 4T+4S
SEVEN, CARD = SHAPES["Qwen/Qwen2.5-Coder-7B"], GPUS["H200"]
WAYS = ("two waves", "overlapping")


@dataclass(frozen=True)
class Group:
    """
    A proposal and the attempts at its task, in tokens.

    Args:
        pair (`int`): Which teacher wrote it, and which student attempts it.
        prompt (`int`): Of the proposal.
        proposal (`int`): Of its completion.
        question (`int`): Of the prompt of the attempts.
        attempts (`tuple[int, ...]`): Of their completions.
    """

    pair: int
    prompt: int
    proposal: int
    question: int
    attempts: tuple[int, ...]


Step = Sequence[Group]


def record(run: Path, steps: int = 3) -> list[list[list[int]]]:
    """Lengths of some steps of a run, evenly spread: of each proposal, prompt, completion, question, attempts."""
    import pandas
    from transformers import AutoTokenizer

    from trl_populora.assets import tiny_base_path

    tokenizer = AutoTokenizer.from_pretrained(tiny_base_path())
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    found = []
    for place in range(steps):
        rows = pandas.read_parquet(files[(2 * place + 1) * len(files) // (2 * steps)])
        rows["prompt_tokens"] = [len(ids) for ids in tokenizer(list(rows["prompt"]))["input_ids"]]
        proposals, attempts = rows[rows.role == "teacher"], rows[rows.role == "student"]
        each = len(attempts) // len(proposals)
        groups = []
        for number, proposal in enumerate(proposals.itertuples()):
            mine = attempts.iloc[number * each : (number + 1) * each]  # in the order of the proposals
            if set(mine.match) != {proposal.match}:
                raise ValueError(f"{run}: the attempts of proposal {number} are of another match. Has it replays?")
            lengths = [int(value) for value in mine.completion_tokens]
            first = (proposal.prompt_tokens, proposal.completion_tokens, mine.prompt_tokens.iloc[0])
            groups.append([*map(int, first), *lengths])
        found.append(groups)
    return found


def read_steps(path: Path) -> list[list[Group]]:
    """The recorded steps. Groups come pair by pair, equally many of each pair."""
    return [
        [Group(place * PAIRS // len(step), *row[:3], tuple(row[3:])) for place, row in enumerate(step)]
        for step in json.loads(path.read_text())["steps"]
    ]


def of_size(steps: Sequence[Step], proposals: int) -> list[list[Group]]:
    """
    Steps of so many proposals: parts of the recorded ones, or several joined.

    Raises:
        `ValueError`: If such steps cannot be made of whole parts or whole steps.
    """
    recorded = len(steps[0])
    if recorded % proposals == 0:
        parts = recorded // proposals
        return [list(step[part::parts]) for step in steps for part in range(parts)]
    joined, rest = divmod(proposals, recorded)
    if rest or joined > len(steps):
        raise ValueError(
            f"{proposals} proposals are neither a part nor a multiple of the {recorded} of a recorded step, of which "
            f"there are {len(steps)}."
        )
    return [sum(map(list, steps[at : at + joined]), []) for at in range(0, len(steps) - joined + 1, joined)]


def draw_steps(proposals: int, length: Callable[[], int], count: int, attempts: int = 8) -> list[list[Group]]:
    """Steps of proposals and attempts that are as long as `length` says."""
    return [
        [
            Group(
                place * PAIRS // proposals,
                LONG.prompt,
                length(),
                LONG.prompt,
                tuple(length() for _ in range(attempts)),
            )
            for place in range(proposals)
        ]
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Work:
    """
    Args:
        iterations (`int`): Of the engine.
        seconds (`float`): Of a 7B on an H200, where each iteration reads weights and cache, or multiplies.
    """

    iterations: int
    seconds: float


def work_out(step: Step, at_once: int, overlapping: bool) -> Work:
    """
    What the engine has to do if it takes requests in the order in which they come, at most `at_once` at a time, and
    each iteration gives every running request a token, the one that reads its prompt, too.
    """
    intervals = []  # first iteration, last one, tokens of the prompt
    places = [0] * at_once  # when each becomes free

    def run(ready: int, tokens: int, prompt: int) -> int:
        start = max(heapq.heappop(places), ready)
        heapq.heappush(places, start + tokens)
        intervals.append((start, start + tokens, prompt))
        return start + tokens

    ends = [run(0, group.proposal, group.prompt) for group in step]
    if not overlapping:
        ends = [max(ends)] * len(step)
    for end, group in sorted(zip(ends, step, strict=True), key=lambda each: each[0]):
        for tokens in group.attempts:
            run(end, tokens, group.question)
    total = max(end for _, end, _ in intervals)
    # Per iteration: running rows, and tokens that their caches hold.
    rows, born, left = [0] * (total + 1), [0] * (total + 1), 0.0
    for start, end, prompt in intervals:
        rows[start] += 1
        rows[end] -= 1
        born[start] += prompt
        born[end] -= prompt + end - start
    running = held = 0
    for iteration in range(total):
        running, held = running + rows[iteration], held + born[iteration]
        left += token_seconds(SEVEN, CARD, running, held / running)
        held += running
    return Work(total, left)


def compare(steps: Iterable[Step], at_once: int) -> dict[str, float]:
    """Overlapping over two waves: iterations, and seconds of a 7B on an H200; means over the steps."""
    pairs = [[work_out(step, at_once, overlapping) for overlapping in (False, True)] for step in steps]
    waves, together = zip(*pairs, strict=True)
    return {
        "iterations_ratio": statistics.fmean(b.iterations / a.iterations for a, b in pairs),
        "seconds_7b_ratio": statistics.fmean(b.seconds / a.seconds for a, b in pairs),
        "iterations": statistics.fmean(work.iterations for work in waves),
        "iterations_overlapping": statistics.fmean(work.iterations for work in together),
    }


class Replay:
    """An engine with eight members, and what it is asked."""

    def __init__(self, llm: Any, published: Sequence[Any], now: Callable[[], float], vocabulary: int):
        self.llm, self.published, self.now, self.vocabulary = llm, published, now, vocabulary
        self.rng, self.asked = random.Random(0), 0

    def run(self, step: Step, overlapping: bool) -> tuple[float, int]:
        """Seconds and iterations of a step."""
        # Prompts are fresh each time: the prefix cache must not help one way more than the other.
        prompts = [(self.draw(group.prompt), self.draw(group.question)) for group in step]
        engine, waiting, iterations = self.llm.llm_engine, {}, 0
        start = self.now()
        for group, (prompt, _) in zip(step, prompts, strict=True):
            waiting[self.add(prompt, group.proposal, group.pair)] = len(waiting)
        ended: list[int] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            iterations += 1
            ended += [waiting.pop(output.request_id) for output in outputs if output.request_id in waiting]
            if ended and (overlapping or not waiting):
                for place in sorted(ended):
                    for tokens in step[place].attempts:
                        self.add(prompts[place][1], tokens, PAIRS + step[place].pair)
                ended = []
        return self.now() - start, iterations

    def draw(self, tokens: int) -> list[int]:
        return [self.rng.randrange(3, self.vocabulary) for _ in range(tokens)]

    def add(self, prompt: list[int], tokens: int, member: int) -> str:
        """Adds a request of exactly so many tokens; returns its id."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from trl_populora.generate.engine import _make_lora_request

        adapter, name = self.published[member], str(self.asked)
        self.asked += 1
        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"prompt_token_ids": prompt, "cache_salt": adapter.name}
        self.llm.llm_engine.add_request(name, request, params, lora_request=_make_lora_request(adapter))
        return name


def summarise(turns: list[dict[str, tuple]]) -> dict[str, Any]:
    """Sums up seconds and iterations of both ways, each turn of which is `{way: (seconds, iterations)}`."""
    return {
        "ratio": statistics.median(turn[WAYS[1]][0] / turn[WAYS[0]][0] for turn in turns),
        "seconds": {way: statistics.median(turn[way][0] for turn in turns) for way in WAYS},
        "iterations": {way: statistics.fmean(turn[way][1] for turn in turns) for way in WAYS},
    }


def measure(sizes: dict[int, list[list[Group]]], options: argparse.Namespace, rows: int) -> dict[int, dict[str, Any]]:
    """By size: seconds of both ways, their ratio, and iterations."""
    import torch
    from gpu_population import make_base
    from vllm_routing import SMALL_DTYPE, make_generation, move

    from trl_populora.assets import tiny_base_path

    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        base, dtype = tiny_base_path(), SMALL_DTYPE
        if options.seven:
            dtype = torch.bfloat16
            base = make_base(SEVEN, Path(directory, "base"), "cuda", dtype)
            torch.cuda.empty_cache()
        share = 0.35 if options.seven else 0.2
        generation, model, names, _ = make_generation(base, options.rank, dtype, directory, rows=rows, share=share)
        move(model, names, seed=1)
        generation.sync_weights()
        published = [generation.published[name] for name in names]
        replay = Replay(generation.llm, published, CLOCKS[options.clock](), min(400, model.config.vocab_size))
        for overlapping in (False, True):
            replay.run(next(iter(sizes.values()))[0], overlapping)
        for size, steps in sizes.items():
            turns: list[dict[str, tuple[float, int]]] = []
            for repeat in range(options.repeats):
                step = steps[repeat % len(steps)]
                # Which way is first alternates, so that a machine that slows down favours neither.
                order = WAYS if repeat % 2 == 0 else WAYS[::-1]
                turns.append({way: replay.run(step, way == "overlapping") for way in order})
            found[size] = summarise(turns)
        generation.close()
        generation.end()
    return found


def measure_steps(options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """By size: seconds of whole plays of both ways, their ratio, and iterations of the engine."""
    import torch

    from trl_populora import PopuLoRAConfig, PopuLoRATrainer

    clock, found, steps = CLOCKS[options.clock](), {}, 0
    with tempfile.TemporaryDirectory() as directory:
        args = PopuLoRAConfig(
            directory,
            teachers=PAIRS,
            students=PAIRS,
            proposals_per_teacher=max(2, max(options.sizes) // PAIRS),
            attempts_per_task=8,
            max_completion_length=256,
            per_device_train_batch_size=12,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            use_vllm=True,
            vllm_gpu_memory_utilization=0.2,
            vllm_max_model_length=1024,
            vllm_engine_kwargs=None if torch.cuda.is_available() else {"enforce_eager": True},
            model_init_kwargs={"dtype": "float32"},
            evolve_every=0,
            save_strategy="no",
            report_to=[],
        )
        trainer = PopuLoRATrainer("tiny", args=args)
        engine, game = trainer.vllm_generation.llm.llm_engine, trainer.game
        take_step = engine.step

        def count() -> Any:
            nonlocal steps
            steps += 1
            return take_step()

        def play(size: int, repeat: int, way: str) -> tuple[float, int]:
            nonlocal steps
            state = {name: copy.deepcopy(getattr(game, name)) for name in ("matchmaker", "archive", "features")}
            player = dataclasses.replace(game.player, overlaps=way == "overlapping")
            state |= {"population": copy.deepcopy(game.population), "player": player, "proposals": size // PAIRS}
            torch.manual_seed(repeat)
            clock.look_again()
            steps, start = 0, clock()
            played = play_step(dataclasses.replace(game, **state), repeat, pay_of)
            print(f"{way}, {size} proposals: {len(played.tasks)} tasks", file=sys.stderr)
            return clock() - start, steps

        engine.step = count
        for size in options.sizes:
            turns = []
            for repeat in range(-1, options.repeats):  # the first turn warms up
                order = WAYS if repeat % 2 == 0 else WAYS[::-1]
                turns.append({way: play(size, repeat + 1, way) for way in order})
            turns = turns[1:]
            found[size] = summarise(turns)
        trainer.close()
        trainer.vllm_generation.end()
    return found


def pay_of(played: Any) -> Any:
    """The rewards of a step without TRL: what the rules pay."""
    import torch

    return torch.tensor([[record["pay"]] for record in played.records])


LABELS = {
    "recorded": "recorded lengths",
    "quarter": "recorded, a quarter of the rows at a time",
    "long": "long mix",
    "limit": "every completion of 256 tokens",
}


def print_sums(sums: dict[str, dict[int, dict[str, float]]]) -> None:
    print(f"\n{'worked out':44}{'proposals':>10}{'two waves':>12}{'overlapping':>13}{'ratio':>8}{'7B, H200':>10}")
    for kind, sizes in sums.items():
        for size, row in sizes.items():
            counts = f"{row['iterations']:>12.0f}{row['iterations_overlapping']:>13.0f}"
            ratios = f"{row['iterations_ratio']:>8.3f}{row['seconds_7b_ratio']:>10.3f}"
            print(f"{LABELS[kind]:44}{size:>10}{counts}{ratios}")


def print_measured(measured: dict[int, dict[str, Any]], what: str, clock: str) -> None:
    title = f"{what}, {clock} seconds; iterations"
    print(f"\n{title:44}{'proposals':>10}{'two waves':>12}{'overlapping':>13}{'ratio':>8}")
    for size, row in measured.items():
        first, second = (f"{row['seconds'][way]:.2f}; {row['iterations'][way]:.0f}" for way in WAYS)
        print(f"{'':44}{size:>10}{first:>12}{second:>13}{row['ratio']:>8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="proposals of a step")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="JSON file that --record made")
    parser.add_argument("--record", type=Path, nargs="+", metavar="RUN", help="print lengths of runs' rollouts")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of both ways for each size")
    parser.add_argument("--max-num-seqs", type=int, help="requests at a time; by default all that a step has")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that has other work")
    parser.add_argument("--seven", action="store_true", help="a random base of the shape of Qwen2.5-7B, on a GPU")
    parser.add_argument("--only", choices=("sums", "replay", "steps"), help="one of the three parts")
    parser.add_argument("--dry-run", action="store_true", help="4 proposals, in one turn")
    options = parser.parse_args()
    if options.record:
        steps = [step for run in options.record for step in record(run)]
        print('{"steps": [\n' + ",\n".join(json.dumps(step, separators=(",", ":")) for step in steps) + "\n]}")
        return
    if options.dry_run:
        options.sizes, options.repeats = [4], 1
    recorded = read_steps(options.lengths)
    try:
        sizes = {size: of_size(recorded, size) for size in options.sizes}
    except ValueError as error:
        parser.error(str(error))
    rows = options.max_num_seqs or max(len(step) * (1 + len(step[0].attempts)) for (step, *_) in sizes.values())

    result: dict[str, Any] = {"largest": {}}
    if options.only in (None, "sums"):
        result |= work_out_all(sizes, rows)
    if options.only in (None, "replay"):
        measured = measure(sizes, options, rows)
        print_measured(measured, "replayed", options.clock)
        result |= {name: {size: row[name] for size, row in measured.items()} for name in next(iter(measured.values()))}
        result["largest"]["ratio"] = measured[max(sizes)]["ratio"]
    if options.only == "steps" or (options.only is None and not options.seven):
        played = measure_steps(options)
        print_measured(played, "steps", options.clock)
        result |= {
            f"step_{name}": {size: row[name] for size, row in played.items()} for name in next(iter(played.values()))
        }
        result["largest"]["step_ratio"] = played[max(sizes)]["ratio"]
    print(json.dumps(rounded(result)))


def work_out_all(sizes: dict[int, list[list[Group]]], rows: int) -> dict[str, Any]:
    """What can be gained, for all kinds of lengths."""
    sums = {kind: {} for kind in ("recorded", "quarter", "long", "limit")}
    for size, steps in sizes.items():
        whole, rng = size * (1 + len(steps[0][0].attempts)), random.Random(0)
        sums["recorded"][size] = compare(steps, min(whole, rows))
        sums["quarter"][size] = compare(steps, whole // 4)
        sums["long"][size] = compare(draw_steps(size, lambda: draw_length(rng), 20), whole)  # noqa: B023
        sums["limit"][size] = compare(draw_steps(size, lambda: 256, 1), whole)
    print_sums(sums)
    return {
        name: {kind: {size: row[name] for size, row in found.items()} for kind, found in sums.items()}
        for name in ("iterations_ratio", "seconds_7b_ratio")
    } | {"largest": {"iterations_ratio": sums["recorded"][max(sizes)]["iterations_ratio"]}}


if __name__ == "__main__":
    main()
