"""What a trainer does with the Hub: TRL's and transformers' hooks, for a population."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerControl
from trl import GRPOConfig, GRPOTrainer

from trl_populora.hub import uploads
from trl_populora.hub.model_card import write_card
from trl_populora.population.members import POPULATION_FILE
from trl_populora.runs.checkpoint import Staging


class HubTrainer(GRPOTrainer):
    """
    A [`~trl.GRPOTrainer`] whose card is a population's, and which uploads frozen copies of a run while training goes
    on. An upload that fails says why, and how to complete it.
    """

    # `PopuLoRATrainer` makes the last two.
    args: GRPOConfig
    control: TrainerControl
    hub_model_id: str
    staging: Staging
    uploads: uploads.Uploads

    def create_model_card(self, model_name=None, dataset_name=None, tags=None, **details):
        root = Path(self.args.output_dir)
        if self.is_world_process_zero() and (root / POPULATION_FILE).exists():
            write_card(root, self.hub_model_id or model_name or root.name, tags, details)

    def init_hf_repo(self, token=None, **kwargs):
        with self.uploads.hub_errors():
            super().init_hf_repo(token=token, **kwargs)

    def push_to_hub(self, commit_message="End of training", **kwargs):
        if self.is_world_process_zero():
            uploads.draw_for_card(Path(self.args.output_dir))
        with self.uploads.hub_errors():
            return super().push_to_hub(commit_message=commit_message, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        if self.staging.directory is None and self.is_world_process_zero() and self.uploads.are_due:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.uploads.start(Path(checkpoint_folder), self.hub_model_id, self.state.global_step)

    def _finish_current_push(self):
        self.uploads.finish(self.hub_model_id)
