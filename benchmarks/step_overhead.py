"""What a whole population step costs with 8 adapters, against one adapter with the same rows and tokens, by phase.

    python benchmarks/step_overhead.py [--clock cpu] [--vllm]
    python benchmarks/step_overhead.py --model Qwen/Qwen2.5-0.5B-Instruct --vllm --tokens 512    # bf16, needs a GPU

`8` is 4 teachers and 4 students with `--proposals` each; `1` is the single agent, one adapter that plays both roles
and writes four times as many proposals. Both go through the same trainer, so the baseline is one adapter served as
LoRA.

Equal work: every row is sampled to `--tokens` tokens, past its end of turn; the whole row is trained on, but only what
stands before the end of turn is read as a proposal or an answer, so that the sandbox has real programs to run. Both
sides start from the same weights, sample under the same seed in every step, and learn at a rate of 1e-7, so that they
write nearly the same texts (`tokens` and `valid` in the table tell how nearly) while every adapter still changes and
has to be published.

Both trainers live at once and train in turn, a few steps per round; each round's first step, a warm-up, and its last,
after which nobody evolves, are not counted. Medians over the steps. `evolve` is an event a step here, and a tenth of
it counts (`evolve_every` is 10 by default). `publish` and `log-probs` are zero without vLLM: nothing is published, and
TRL needs no old log-probabilities. `--clock cpu` counts CPU seconds of this process and of the sandbox's (with
OMP_NUM_THREADS=1), for a machine that has other work. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from trl_populora import trainer as populora_trainer
from trl_populora.config import PopuLoRAConfig
from trl_populora.population import evolution
from trl_populora.step import play as step_play
from trl_populora.trainer import PopuLoRATrainer


PAIRS = 4  # teachers, and students
ATTEMPTS = 4
EVOLVE_EVERY = 10
PHASES = ("match", "propose", "verify", "solve", "log-probs", "update", "publish", "evolve")


class CpuClock:
    """CPU seconds of this process, and of the sandbox's processes with those that they have waited for."""

    def __init__(self):
        self.look_again()

    def look_again(self) -> None:
        """Finds the processes below this one; too slow to be done at every reading."""
        self.descendants = psutil.Process().children(recursive=True)

    def __call__(self) -> float:
        return time.process_time() + sum(map(self._seconds, self.descendants))

    @staticmethod
    def _seconds(process: psutil.Process) -> float:
        try:
            return sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:  # its parent has its seconds
            return 0.0


class WallClock:
    """Seconds on the wall, when the GPU has done what it was asked."""

    def look_again(self) -> None:
        """Nothing to find."""

    def __call__(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


CLOCKS = {"wall": WallClock, "cpu": CpuClock}


class FixedLengthTrainer(PopuLoRATrainer):
    """
    A population whose rows all have the same number of tokens; notes the seconds of what has no phase of its own.
    """

    def __init__(self, *args, clock, **kwargs):
        super().__init__(*args, **kwargs)
        self.clock, self.spent = clock, dict.fromkeys(("log-probs", "publish"), 0.0)
        self.end_of_turn = set(self.eos_token_ids)
        self.eos_token_ids = [never_sampled(self.model.config)]
        if self.use_vllm:
            publish = self.vllm_generation.sync_weights
            self.vllm_generation.sync_weights = lambda: self._timed("publish", publish)

    def _timed(self, phase, action, *args, **kwargs):
        start = self.clock()
        result = action(*args, **kwargs)
        self.spent[phase] += self.clock() - start
        return result

    def _generate_rows(self, prompts, members, seeds=None):
        rows = super()._generate_rows(prompts, members, seeds)
        return [replace(row, text=self._read(row.completion_ids)) for row in rows]

    def _read(self, ids: list[int]) -> str:
        end = next((i for i, token in enumerate(ids) if token in self.end_of_turn), len(ids))
        return self.processing_class.decode(ids[:end], skip_special_tokens=True)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self._timed("log-probs", super()._get_per_token_logps_and_entropies, *args, **kwargs)


def never_sampled(config) -> int:
    """A token id outside the vocabulary: an end of turn that never comes."""
    return config.vocab_size


class Recorder(TrainerCallback):
    """Seconds by phase, tokens and valid proposals of every step but each round's first and last."""

    def __init__(self, trainer: FixedLengthTrainer):
        self.trainer, self.steps = trainer, []

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)
        self.trainer.clock.look_again()
        self.start, self.tokens = self.trainer.clock(), state.num_input_tokens_seen
        self.trainer.spent = dict.fromkeys(self.trainer.spent, 0.0)

    def on_step_end(self, args, state, control, **kwargs):
        total = self.trainer.clock() - self.start
        metrics = {name: values[-1] for name, values in self.trainer._metrics["train"].items() if values}
        seconds = {phase: metrics[f"time/{phase}"] for phase in ("match", "propose", "verify", "solve")}
        seconds |= self.trainer.spent
        seconds["propose"] -= seconds["publish"]
        seconds["evolve"] = metrics.get("time/evolve", 0.0)
        seconds["update"] = total - sum(seconds.values())
        seconds["evolve"] /= EVOLVE_EVERY
        seconds["total"] = sum(seconds.values())
        tokens = state.num_input_tokens_seen - self.tokens
        if 1 < state.global_step < state.max_steps:
            self.steps.append(seconds | {"tokens": tokens, "valid": metrics["propose/valid_rate"]})


def make_trainer(
    options: argparse.Namespace,
    clock,
    directory: str,
    pairs: int,
    proposals: int,
    single: bool = False,
    attempts: int = ATTEMPTS,
) -> tuple[FixedLengthTrainer, Recorder]:
    """So many teachers and students, each teacher with so many proposals; or the single agent with that many."""
    on_gpu = torch.cuda.is_available()
    args = PopuLoRAConfig(
        directory,
        teachers=pairs,
        students=pairs,
        single_agent=single,
        proposals_per_teacher=proposals,
        attempts_per_task=attempts,
        references_per_proposal=2,
        inputs_per_function=6,
        per_device_train_batch_size=options.batch,
        max_completion_length=options.tokens,
        generation_tokens=getattr(options, "generation_tokens", None),
        max_steps=options.steps + 2,
        learning_rate=1e-7,
        evolve_every=0 if single else 1,
        evolve_burn_in=0,
        sandbox_workers=1,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=on_gpu,
        use_vllm=options.vllm,
        vllm_gpu_memory_utilization=0.2,
        vllm_max_model_length=4096 if on_gpu else 1024,
        vllm_engine_kwargs=None if on_gpu else {"enforce_eager": True},
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = FixedLengthTrainer(
        options.model,
        args=args,
        peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
        clock=clock,
    )
    if options.vllm:
        trainer.vllm_generation.generation_kwargs = {"ignore_eos": True}
    else:
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids
    # Rows of one length end together, and `_generate_rows` here reads texts when all have ended.
    trainer.game.player.overlaps = False
    recorder = Recorder(trainer)
    trainer.add_callback(recorder)
    return trainer, recorder


def print_table(sides: dict[str, dict[str, float]]) -> None:
    print(f"{'':12}{'8 adapters':>12}{'1 adapter':>12}{'ratio':>8}")
    for name in (*PHASES, "total", "tokens", "valid"):
        eight, one = sides["8"][name], sides["1"][name]
        ratio = f"{eight / one:8.3f}" if one > 0.001 else f"{'-':>8}"
        print(f"{name:12}{eight:12.3f}{one:12.3f}{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--vllm", action="store_true", help="generate with a colocated vLLM engine per side")
    parser.add_argument("--model", default="tiny", help="base model; with a GPU it runs there, in bf16")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--proposals", type=int, default=6, help="proposals per teacher of the population")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of every completion")
    parser.add_argument("--batch", type=int, default=24, help="rows of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="counted steps per round and side")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]()
    for module in (step_play, populora_trainer, evolution):  # whose own timers name the phases
        module.time = SimpleNamespace(perf_counter=clock)
    with tempfile.TemporaryDirectory() as directory:
        sides = {
            "8": make_trainer(options, clock, f"{directory}/eight", PAIRS, options.proposals),
            "1": make_trainer(options, clock, f"{directory}/one", 1, PAIRS * options.proposals, single=True),
        }
        for _ in range(options.rounds):
            for trainer, _ in sides.values():
                trainer.train()
        for trainer, _ in sides.values():
            trainer.close()
    medians = {
        name: {key: statistics.median(step[key] for step in recorder.steps) for key in recorder.steps[0]}
        for name, (_, recorder) in sides.items()
    }
    rows = PAIRS * options.proposals * (1 + ATTEMPTS)
    print(f"\n{options.model}, rank {options.rank}, {rows} rows of {options.tokens} sampled tokens a step, ", end="")
    print(f"{'vLLM' if options.vllm else 'transformers'}, {options.clock} seconds, {len(sides['8'][1].steps)} steps")
    print_table(medians)
    result = {"step_ratio_8_vs_1": medians["8"]["total"] / medians["1"]["total"]}
    for name, values in medians.items():
        result[f"seconds_{name}"] = {phase: round(values[phase], 4) for phase in (*PHASES, "total")}
        result[f"tokens_{name}"], result[f"valid_{name}"] = values["tokens"], round(values["valid"], 3)
    result["step_ratio_8_vs_1"] = round(result["step_ratio_8_vs_1"], 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
