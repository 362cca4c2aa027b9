"""Uploads to the Hub.

    a checkpoint during training --Uploads, HubTrainer--> model repository
    a finished run               --push_run-------------> model repository
    archive.parquet              --push_archive---------> dataset repository
    report of a run              --push_space-----------> static Space

A model repository has files of the run's directory: `members/<name>/`, the tokenizer, `population.json`,
`lineage.jsonl`, `archive.parquet`, `metrics.jsonl`, `times.jsonl`, `rollouts/`, `plots/` and the model card. At its
root lies the best student as an ordinary adapter, so that `PeftModel.from_pretrained(base, repo)` works.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, SpaceCardData, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from transformers import TrainerControl, TrainingArguments
from transformers.trainer_utils import HubStrategy
from trl import GRPOConfig, GRPOTrainer

from trl_populora.files import write_json, write_whole
from trl_populora.hub.card import PICTURES, format_archive_card, write_card
from trl_populora.hub.download import is_connection_error
from trl_populora.hub.eval_results import OURS
from trl_populora.report.load import load_run
from trl_populora.report.page import build_page, load_shown
from trl_populora.report.plots import draw_plots
from trl_populora.run.checkpoint import Staging
from trl_populora.run.read import POPULATION_FILE, read_population
from trl_populora.run.saved_population import check_one_moment, check_plays, find_best_adapter


logger = logging.getLogger(__name__)

# Files of a checkpoint that only a resume reads: their names begin with one of these texts.
RESUME_ONLY = (
    "optimizer",
    "scheduler",
    "rng_state",
    "rank_state",
    "game.json",
    "trainer_state",
    "whole.json",
    "global_",
)
# Glob patterns that `push_run` leaves out. `trainer_state.json` goes up: at the root of a run it is the log of the
# whole run.
NOT_UPLOADED = ["_*", "checkpoint-*", "*.tmp", *(f"{name}*" for name in RESUME_ONLY if name != "trainer_state")]
STAGES = "_push"


class Uploads:
    """
    The uploads of checkpoints during training. Each upload reads a frozen copy of the run.

    Args:
        args: Names the run's directory, strategy (`hub_strategy`), token and revision.
    """

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.run = Path(args.output_dir)
        self.begun: list[Future] = []
        self.api = HfApi()  # its uploads in the background run one after another; those of two clients would race

    def explain_hub_errors(self, repo: str | None = None) -> AbstractContextManager:
        """Calls the function `explain_hub_errors` for this run; without `repo`, for the run's own repository."""
        return explain_hub_errors(repo or self.args.hub_model_id or self.run.name, self.args.output_dir)

    @property
    def are_due(self) -> bool:
        """
        Whether a checkpoint is uploaded now. With `hub_strategy="end"` no checkpoint ever is. While another upload is
        under way, a checkpoint is uploaded if `hub_always_push` is set.
        """
        idle = all(job.done() for job in self.begun)
        return self.args.hub_strategy != HubStrategy.END and (idle or self.args.hub_always_push)

    def start(self, checkpoint: Path, repo: str, step: int) -> None:
        """Starts an upload in the background: the run as it is at a checkpoint."""
        self._drop_ended(repo)
        # If no upload reads the frozen copies, they are removed. A copy of a killed run may be among them.
        if not self.begun:
            shutil.rmtree(self.run / STAGES, ignore_errors=True)
        stage = make_stage(self.run, checkpoint, self.args.hub_strategy)
        draw_for_card(stage)
        write_card(stage, repo)
        job = self.api.upload_folder(
            repo_id=repo,
            folder_path=stage,
            commit_message=f"Training in progress, step {step}",
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            # Deletes old score files in the repository: the scores may be those of earlier weights.
            delete_patterns=OURS,
            run_as_future=True,
        )
        self.begun.append(job)

    def finish(self, repo: str | None) -> None:
        """Waits for uploads that are under way, and removes the copies."""
        if not all(job.done() for job in self.begun):
            logger.info("Waiting for the upload of a checkpoint, which may take a couple of minutes.")
        wait(self.begun)
        self._drop_ended(repo)
        if self.args.process_index == 0:
            shutil.rmtree(self.run / STAGES, ignore_errors=True)

    def _drop_ended(self, repo: str | None) -> None:
        """Forgets uploads that have ended, and warns of each that failed."""
        # A failed upload in the background says nothing by itself, and training goes on.
        for job in [job for job in self.begun if job.done()]:
            self.begun.remove(job)
            if (error := job.exception()) is not None:
                try:
                    with self.explain_hub_errors(repo):
                        raise error
                except Exception as explained:
                    logger.warning("%s", explained)


def place_best_student(root: Path) -> None:
    """Copies the best student's adapter to the root of a saved population."""
    best = find_best_adapter(root)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with write_whole(root / name) as unfinished:
            shutil.copyfile(best / name, unfinished)


def draw_for_card(root: Path) -> None:
    """Draws the pictures of the model card into `plots/`. If matplotlib or readable records are missing, it warns."""
    try:
        draw_plots(load_run(root), root / "plots", PICTURES)
    # Causes: the `report` extra is not installed, no step was logged, or a file is broken.
    except (ImportError, ValueError) as reason:
        logger.warning("The pictures for the model card of %s are not drawn: %s", root, reason)


def make_stage(run: Path, checkpoint: Path, strategy: str) -> Path:
    """
    Copies the files that an upload at a checkpoint sends. The copy stays as it is while training goes on, and even if
    training deletes the checkpoint.

    Args:
        run: The run's directory.
        checkpoint: A whole checkpoint of the run.
        strategy: `hub_strategy`. `"checkpoint"` and `"all_checkpoints"` add the checkpoint with its files for a
            resume.

    Returns:
        Directory of the copy.
    """
    stage = run / STAGES / checkpoint.name
    shutil.rmtree(stage, ignore_errors=True)
    # Hard links take no time and no space. They work because nobody changes these files: those of a checkpoint are
    # never written again, and rollouts come from `write_whole`, which replaces a file by a new one.
    shutil.copytree(
        checkpoint, stage, copy_function=_link, ignore=lambda _, names: [n for n in names if n.startswith(RESUME_ONLY)]
    )
    for name in ("metrics.jsonl", "times.jsonl", "README.md"):
        # The first two grow while the upload reads the copy, and a hard link would grow, too. The third may be a card
        # that the user has edited.
        if (run / name).exists():
            shutil.copyfile(run / name, stage / name)
    if (run / "rollouts").is_dir():
        shutil.copytree(
            run / "rollouts", stage / "rollouts", copy_function=_link, ignore=shutil.ignore_patterns("*.tmp")
        )
    place_best_student(stage)
    if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
        shutil.copytree(checkpoint, stage / name, copy_function=_link)
    return stage


def _link(source: str, target: str) -> str:
    """Makes a hard link, or a copy on a file system without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def push_run(run: str | Path, repo: str, token: str | None = None, private: bool | None = None) -> str:
    """
    Uploads the directory of a run. It makes the repository if there is none, and needs no trainer.

    Args:
        run: The run's `output_dir`, saved with `save_model()`.
        repo: Model repository, `user/name`.
        token: Write token; by default the one of `hf auth login`.
        private: Whether a new repository is private; by default what the user's account says.

    Returns:
        `str`: URL of the commit.

    Raises:
        `ValueError`: If the directory holds no saved population, lacks an adapter, or has files of different steps.
        `RuntimeError`: If the upload fails. The message says why, and how to complete it.
    """
    root = Path(run)
    population = read_population(root)
    check_one_moment(root, population)
    # `read_population` leaves secrets out, so they are gone once the file is written again.
    write_json(root / POPULATION_FILE, population)
    place_best_student(root)
    draw_for_card(root)
    write_card(root, repo)
    with explain_hub_errors(repo, str(run)), warnings.catch_warnings():
        # The client warns of each data file in a model repository. The archive and the rollouts belong there.
        warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
        repo = HfApi().create_repo(repo, token=token, private=private, exist_ok=True).repo_id
        commit = HfApi().upload_folder(
            repo_id=repo,
            folder_path=root,
            commit_message="Upload population",
            token=token,
            ignore_patterns=NOT_UPLOADED,
            # Deletes old score files in the repository: the scores may be those of earlier weights.
            delete_patterns=OURS,
        )
    return commit.commit_url


def push_archive(run: str | Path, repo: str, token: str | None = None, private: bool | None = None) -> str:
    """
    Uploads the task archive of a run as a dataset, with a card. It makes the repository if there is none.

    `load_dataset(repo)` opens the archive. Passed as `train_dataset`, it seeds another run.

    Args:
        run: The run's `output_dir`, saved with `save_model()`, or a checkpoint.
        repo: Dataset repository, `user/name`.
        token: Write token; by default the one of `hf auth login`.
        private: Whether a new repository is private; by default what the user's account says.

    Returns:
        `str`: URL of the commit.

    Raises:
        `ValueError`: If the directory holds no `population.json` or no archive (a dataset run has none), or if these
            two files are from different steps.
        `RuntimeError`: If the upload fails. The message says why, and how to complete it.
    """
    path, population = Path(run, "archive.parquet"), read_population(run)
    check_plays(run, population)
    card = format_archive_card(path, population, repo)
    # No adapter is uploaded here, so only the archive's step is compared.
    check_one_moment(Path(run), population, adapters=())
    with explain_hub_errors(repo, str(run), "--archive_repo"):
        repo = HfApi().create_repo(repo, token=token, private=private, repo_type="dataset", exist_ok=True).repo_id
        commit = HfApi().create_commit(
            repo_id=repo,
            repo_type="dataset",
            operations=[CommitOperationAdd(path.name, path), CommitOperationAdd("README.md", card.encode())],
            commit_message="Upload task archive",
            token=token,
        )
    return commit.commit_url


@contextmanager
def explain_hub_errors(repo: str, run: str, option: str = "--repo") -> Iterator[None]:
    """
    Turns errors of the Hub and the network into a `RuntimeError` that says why, and how to complete the upload.

    Args:
        repo: Repository of the upload.
        run: Directory of the run.
        option: Option of `populora push` that names the repository.
    """
    try:
        yield
    except LocalTokenNotFoundError as error:
        reason = "there is no token; run `hf auth login` or set `HF_TOKEN`"
        raise RuntimeError(_advise(reason, repo, run, option)) from error
    except HfHubHTTPError as error:
        reasons = {
            401: "the token is missing or not valid; run `hf auth login`, or set `HF_TOKEN`, `hub_token` or `--token`",
            403: f"the token may not write to {repo}; use one with write access, or another repository",
        }
        status = error.response.status_code
        reason = reasons.get(status, f"status {status}, {error!s:.300}")
        raise RuntimeError(_advise(reason, repo, run, option)) from error
    except Exception as error:
        if not is_connection_error(error):
            raise
        raise RuntimeError(_advise(f"the connection failed ({error!r:.300})", repo, run, option)) from error


def _advise(reason: str, repo: str, run: str, option: str) -> str:
    """Writes the message of a failed upload."""
    return (
        f"Pushing {run} to {repo} at {constants.ENDPOINT} failed: {reason}. The local files are intact. Once "
        f"the run is saved, `populora push {run} {option} {repo}` completes the upload."
    )


# A static Space shows the page of a run's report. It needs no server.


def push_space(
    run: str | Path, repo: str, token: str | None = None, private: bool | None = None, model: str | None = None
) -> str:
    """
    Uploads the report of a run as a static Space. The run may still be training.

    Args:
        run: The run's `output_dir`.
        repo: Space, `user/name`. It is made if there is none.
        token: Write token; by default the one of `hf auth login`.
        private: Whether a new Space is private; by default what the user's account says.
        model: Repository of the population. The Space links to it.

    Returns:
        `str`: URL of the commit.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
        `RuntimeError`: If the upload fails. The message says why, and how to complete it.
    """
    with TemporaryDirectory() as place:
        make_space(run, place, repo, model)
        with explain_hub_errors(repo, str(run), "--space"):
            repo = (
                HfApi()
                .create_repo(repo, token=token, private=private, repo_type="space", space_sdk="static", exist_ok=True)
                .repo_id
            )
            files = [CommitOperationAdd(path.name, path) for path in sorted(Path(place).iterdir())]
            commit = HfApi().create_commit(
                repo_id=repo, repo_type="space", operations=files, commit_message="Upload report", token=token
            )
    return commit.commit_url


def make_space(run: str | Path, directory: str | Path, repo: str, model: str | None = None) -> None:
    """Writes the two files of a Space, `index.html` and the card, into an empty directory."""
    name, root = repo.split("/")[-1], Path(directory)
    records = load_run(run, name)
    # The page holds its pictures, so their files are not needed afterwards. It links to no rollouts: a Space has none.
    with TemporaryDirectory() as pictures:
        text = build_page(records, draw_plots(records, Path(pictures)), load_shown(run, records), None)
    (root / "index.html").write_text(text, encoding="utf-8")
    card = SpaceCardData(
        title=name,
        sdk="static",
        app_file="index.html",
        short_description="Report of a PopuLoRA run",
        tags=["populora", "trl-populora", "trl"],
        models=[model] if model else None,
    )
    (root / "README.md").write_text(f"---\n{card.to_yaml()}\n---\n", encoding="utf-8")


# The hooks by which TRL and transformers upload during training.


class HubTrainer(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] that writes a population's card and uploads frozen copies of the run during training.

    transformers' own upload copies only a model's files at the root of a checkpoint, and so leaves the members out. If
    an upload fails, the error or warning says why, and how to complete it.
    """

    # `PopuLoRATrainer.__init__` sets `staging` and `uploads`.
    args: GRPOConfig
    control: TrainerControl
    hub_model_id: str
    staging: Staging
    uploads: Uploads

    def create_model_card(self, model_name=None, dataset_name=None, tags=None, **details):
        root = Path(self.args.output_dir)
        # TRL calls this at every checkpoint. Before the first log there is no `population.json` to write a card from.
        if self.is_world_process_zero() and (root / POPULATION_FILE).exists():
            named = {} if dataset_name is None else {"datasets": dataset_name}
            write_card(root, self.hub_model_id or model_name or root.name, tags, named | details)

    def init_hf_repo(self, token=None, **kwargs):
        with self.uploads.explain_hub_errors():
            super().init_hf_repo(token=token, **kwargs)

    def push_to_hub(self, commit_message="End of training", **kwargs):
        if self.is_world_process_zero():
            draw_for_card(Path(self.args.output_dir))
        with self.uploads.explain_hub_errors():
            url = super().push_to_hub(commit_message=commit_message, **kwargs)
            if self.is_world_process_zero():
                self._take_off_earlier_figures(kwargs.get("token"), kwargs.get("revision"))
        return url

    def _take_off_earlier_figures(self, token: str | None, revision: str | None) -> None:
        """Deletes score files in the repository that the run's directory lacks: they are those of earlier weights."""
        where: dict[str, Any] = {
            "repo_id": self.hub_model_id,
            "token": token or self.args.hub_token,
            "revision": revision or self.args.hub_revision,
        }
        files = HfApi().list_repo_files(**where)
        gone = [file for file in fnmatch.filter(files, OURS) if not Path(self.args.output_dir, file).exists()]
        if gone:
            HfApi().delete_files(delete_patterns=gone, commit_message="Delete scores of earlier weights", **where)

    def _push_from_checkpoint(self, checkpoint_folder):
        # This method is called twice for a checkpoint: by transformers while the checkpoint is still being written
        # (`staging.directory` is set), and by `PopuLoRATrainer._save_checkpoint` when it is in its place. Only the
        # second call uploads.
        if self.staging.directory is None and self.is_world_process_zero() and self.uploads.are_due:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.uploads.start(Path(checkpoint_folder), self.hub_model_id, self.state.global_step)

    def _finish_current_push(self):
        self.uploads.finish(self.hub_model_id)
