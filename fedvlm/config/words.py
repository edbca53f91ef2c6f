"""Words of other libraries (PFLlib, Flower, PyTorch, scikit-learn) and what they are called here, for errors that answer."""

from __future__ import annotations

SAME = {
    "lr": ("learning_rate", "local_learning_rate", "local_lr", "client_lr", "lr_local", "eta", "step_size"),
    "epochs": ("local_epochs", "num_epochs", "n_epochs", "local_ep", "local_steps", "max_epochs", "num_train_epochs"),
    "rounds": (
        *("global_rounds", "num_rounds", "num_server_rounds", "comm_round", "comm_rounds", "communication_rounds"),
        *("global_epochs", "n_rounds", "iterations", "max_rounds", "steps", "max_steps"),
    ),
    "batch": ("batch_size", "bs", "local_batch_size", "local_bs", "lbs", "train_batch_size", "batchsize"),
    "optimiser": ("optimizer", "optim", "opt"),
    "weight_decay": ("wd", "l2"),
    "schedule": ("scheduler", "lr_scheduler", "lr_schedule"),
    "clients": ("num_clients", "n_clients", "num_users", "n_parties", "num_partitions", "num_supernodes", "users"),
    "participation": (
        *("join_ratio", "frac", "fraction", "fraction_fit", "fraction_train", "client_fraction", "sample_ratio"),
        *("sample_rate", "participation_rate", "clients_per_round"),
    ),
    "alpha": ("dir_alpha", "dirichlet_alpha", "dirichlet", "concentration"),
    "partition": ("partitioner", "partition_method", "partition_type", "niid", "noniid", "non_iid", "iid"),
    "data": ("dataset", "data_dir", "data_path", "dataset_name", "root", "train_data", "dataset_path"),
    "backbone": ("model", "model_name", "arch", "encoder", "pretrained", "clip_model", "checkpoint", "net"),
    "device": ("gpu", "gpus", "cuda", "use_cuda", "use_gpu", "device_id", "num_gpus", "no_cuda", "accelerator"),
    "seed": ("random_seed", "manual_seed", "random_state", "rng"),
    "out": ("output", "output_dir", "outdir", "save_dir", "log_dir", "logdir", "result_dir", "save_path", "folder"),
    "jobs": ("num_workers", "n_jobs", "nproc", "parallel", "processes"),
    "evaluate": ("eval_gap", "eval_every", "test_freq", "eval_interval", "eval_freq", "evaluate_every", "val_interval"),
    "dropout": ("client_drop_rate", "drop_rate", "straggler_rate"),
    "template": ("prompt_template", "prompt", "templates", "text_template"),
    "names": ("class_names", "classnames", "label_names", "idx_to_class"),
    "shots": ("num_shots", "n_shots", "k_shot", "few_shot", "fewshot"),
    "mu": ("proximal_mu", "prox_mu", "mu_prox"),
    "unseen": ("target_domain", "test_env", "test_envs", "test_domain", "holdout", "held_out", "leave_out"),
    "epsilon": ("dp_epsilon", "target_epsilon", "privacy_budget"),
    "delta": ("target_delta", "dp_delta"),
    "clip_norm": ("max_grad_norm", "clipping_norm", "l2_norm_clip", "grad_clip", "dp_clip"),
    "noise_multiplier": ("noise_scale", "sigma", "dp_sigma"),
    "split": ("train_split", "val_split", "test_size", "train_ratio", "train_test_split", "val_size"),
    "threads": ("num_threads", "n_threads", "torch_threads"),
    "log": ("logger", "tracker", "tracking", "wandb", "tensorboard", "mlflow", "report_to"),
    "metrics": ("metric", "eval_metrics", "scoring"),
    "protocol": ("setting", "scenario", "evaluation_protocol"),
}
KEYS = {other: name for name, others in SAME.items() for other in others}
VALUES = {
    ("device", "gpu"): "cuda",
    ("optimiser", "SGD"): "sgd",
    ("optimiser", "Adam"): "adam",
    ("optimiser", "AdamW"): "adamw",
    ("partition", "dir"): "dirichlet",
    ("partition", "noniid"): "dirichlet",
    ("partition", "non-iid"): "dirichlet",
    ("partition", "pat"): "pathological",
    ("protocol", "lodo"): "leave-one-domain-out",
    ("protocol", "leave-one-out"): "leave-one-domain-out",
    ("protocol", "base2novel"): "base-to-novel",
}  # (key, value) → the value here
COMMANDS = {
    "train": "run",
    "fit": "run",
    "start": "run",
    "simulate": "run",
    "benchmark": "bench",
    "sweep": "bench",
    "list": "ls",
    "test": "evaluate",
    "eval": "evaluate",
    "infer": "predict",
    "inference": "predict",
    "classify": "predict",
    "info": "show",
    "describe": "show",
    "table": "compare",
    "plot": "report",
    "check": "doctor",
}
METHOD = ("method", "algo", "strategy", "federated_algorithm")  # keys elsewhere, a word of its own here


def key(name: str) -> str:
    """The key of this name, whichever library it is from; the name itself where no library is known to have it."""
    plain = name.replace("-", "_")
    return KEYS.get(plain.lower(), plain)


def value(name: str, given: str) -> str:
    """The value here; "" where none is known."""
    if name == "device" and (given.lower().startswith(("cuda", "gpu")) or given.isdigit()):
        return "cuda"
    return VALUES.get((name, given), VALUES.get((name, given.lower()), ""))


def option(word: str, following: str) -> str:
    """`--lr 0.1` or `--lr=0.1` as the key that it means: `lr=0.1`."""
    name, _, given = word.lstrip("-").partition("=")
    here = key(name)
    shown = given or (following if following and not following.startswith("-") and "=" not in following else "…")
    return f"{here}={value(here, shown) or shown}"
