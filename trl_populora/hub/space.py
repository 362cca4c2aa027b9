"""A static Space that shows a run's report: the same page, without a server."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, HfApi, SpaceCardData

from trl_populora.hub.uploads import hub_errors
from trl_populora.report.load import load_run, load_samples
from trl_populora.report.page import page
from trl_populora.report.plots import draw_plots


def push_space(
    run: str | Path, repo: str, token: str | None = None, private: bool | None = None, model: str | None = None
) -> str:
    """
    Uploads the report of a run, also of one that goes on, as a static Space.

    Args:
        run: The run's `output_dir`.
        repo: `user/name`, of a Space; made if absent.
        token: Write token; the one of `hf auth login` by default.
        private: For a new Space.
        model: Repository of the population, to which the Space then links.

    Returns:
        `str`: Address of the commit.

    Raises:
        `ValueError`: If the run has not logged a step yet.
        `RuntimeError`: If the upload fails; the message says why and how to complete it.
    """
    with TemporaryDirectory() as place:
        make_space(run, place, repo, model)
        with hub_errors(repo, str(run), "--space"):
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
    """Writes the Space's two files, `index.html` and the card, into an empty directory."""
    name, root = repo.split("/")[-1], Path(directory)
    records = load_run(run, name)
    with TemporaryDirectory() as pictures:
        text = page(records, draw_plots(records, Path(pictures)), load_samples(run), None)
    (root / "index.html").write_text(text, encoding="utf-8")
    card = SpaceCardData(
        title=name,
        sdk="static",
        app_file="index.html",
        short_description="Report of a PopuLoRA run",
        tags=["populora", "trl"],
        models=[model] if model else None,
    )
    (root / "README.md").write_text(f"---\n{card.to_yaml()}\n---\n", encoding="utf-8")
