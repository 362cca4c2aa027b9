"""A token that a run was given is in none of its files, nor in what trackers and the Hub get."""

from __future__ import annotations

import json

import pytest

from tests.populora_run import make_trainer
from trl_populora.files import drop_secret_flags, drop_secrets
from trl_populora.hub.card import write_card
from trl_populora.hub.push import push_run
from trl_populora.run.read import read_population


TOKEN = "hf_" + "s3cret" * 5
NESTED = {
    "vllm_engine_kwargs": {"hf_token": TOKEN, "model_loader_extra_config": {"aws": [{"secret_access_key": TOKEN}]}},
    "generation_kwargs": {"token": TOKEN, "stop_token_ids": [65]},
    "chat_template_kwargs": {"API-Key": TOKEN, "enable_thinking": False},
    "lr_scheduler_kwargs": {"password": TOKEN},
}


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hf_token", "HF_TOKEN", "hub_token", "auth-token", "accessToken", "use_auth_token", "api_key"),
        *("apiKey", "password", "passwd", "client_secret", "aws_secret_access_key", "Authorization", "credentials"),
    ],
)
def test_known_names_of_secrets_are_left_out_at_any_depth(name):
    assert drop_secrets({"a": [{"b": {name: TOKEN, "c": 1}}], name: TOKEN}) == {"a": [{"b": {"c": 1}}]}


def test_settings_that_are_no_secrets_stay():
    kept = dict.fromkeys(("eos_token", "pad_token", "max_new_tokens", "eos_token_id", "generation_tokens"), 1)
    kept |= {"stop_token_ids": [1, 2], "top_k": 5, "keys": {"key": "value"}, "tokenizer": None}
    assert drop_secrets(kept) == kept


def test_no_file_of_a_run_holds_a_token(base, tmp_path):
    settings = NESTED | {"hub_token": TOKEN, "model_init_kwargs": {"token": TOKEN}, "save_strategy": "steps"}
    trainer = make_trainer(base, str(tmp_path / "run"), settings | {"max_steps": 1, "save_steps": 1})
    assert trainer.args.generation_kwargs["token"] == TOKEN, "it is used all the same"
    trainer.train()
    trainer.save_model()
    write_card(tmp_path / "run", "me/run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path.name for path in files if TOKEN.encode() in path.read_bytes()] == []
    saved = read_population(tmp_path / "run")["settings"]
    assert saved["generation_kwargs"] == {"stop_token_ids": [65]}
    assert saved["chat_template_kwargs"] == {"enable_thinking": False}
    trainer.train(resume_from_checkpoint=True)


def test_no_tracker_gets_a_token(make_args):
    args = make_args(**NESTED, hub_token=TOKEN, model_init_kwargs={"token": TOKEN, "dtype": "float32"})
    assert TOKEN not in args.to_json_string()
    assert args.to_dict()["model_init_kwargs"] == {"dtype": "float32"}
    assert args.model_init_kwargs["token"] == TOKEN


def test_a_run_of_an_earlier_version_is_pushed_without_its_token(finished, tmp_path, hub, two_plots):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    saved = json.loads((run / "population.json").read_text())
    saved["settings"]["vllm_engine_kwargs"] = NESTED["vllm_engine_kwargs"]
    (run / "population.json").write_text(json.dumps(saved))
    push_run(run, "me/early")
    assert not [name for name, held in hub.repos["me/early"].items() if TOKEN.encode() in held]


@pytest.mark.parametrize("flags", ["--hf-token VALUE", "--hf-token=VALUE", "--api-key VALUE --api_key=VALUE"])
def test_a_secret_among_flags_is_dropped_with_its_value(flags):
    words = ["--dtype", "float32", *flags.replace("VALUE", TOKEN).split(), "--max-num-batched-tokens", "8", "--quiet"]
    assert drop_secret_flags(words) == ["--dtype", "float32", "--max-num-batched-tokens", "8", "--quiet"]
