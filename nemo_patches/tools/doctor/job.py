"""The job that a config describes:
ranks, strategy, encoders and data sets, as NeMo and Lightning would take them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from nemo_patches.tools import counted
from nemo_patches.tools.doctor import datasets, encoders
from nemo_patches.tools.doctor.config import Config, Section, Value
from nemo_patches.tools.doctor.datasets import ROLES, Dataset
from nemo_patches.tools.doctor.encoders import Encoder
from nemo_patches.tools.doctor.known_keys import TABLE
from nemo_patches.tools.doctor.syntax import last_part
from nemo_patches.tools.doctor.trees import Keys

_TESTING = re.compile(r"(?i)^(eval|infer|predict|test|valid)")


@dataclass(frozen=True)
class Job:
    """A config, and how it would run as stock NeMo."""

    config: Config

    @property
    def headline(self) -> str:
        encoders = f"{counted(len(self.encoders), 'encoder')} with a length sync"
        sets = counted(len(self.datasets), "data set")
        if not self.has_trainer:
            trainer = "no trainer section for Lightning's Trainer, so no rule on ranks applies"
            return f"{trainer}; {encoders}; {sets}"
        ranks = "as many ranks as there are devices"
        if self.ranks:
            ranks = counted(self.ranks, "rank")
        strategy = "null" if self.strategy.value is None else self.strategy.value
        trainer = f"judged as stock NeMo; strategy {strategy}; {ranks}"
        return f"{trainer}; {encoders}; {sets}"

    def get(self, path: Keys | str, default: Any = None) -> Value:
        return self.config.get(path, default)

    def trainer(self, key: str, default: Any = None) -> Value:
        return self.get(("trainer", key), default)

    def limit(self, role: str) -> Value:
        """How many batches of the sets of one role each rank reads at most; as in Lightning,
        overfit_batches and fast_dev_run take precedence.
        """
        overfit = self.trainer("overfit_batches", 0.0)
        fast = self.trainer("fast_dev_run", False)
        if role != "test" and (overfit.number or not overfit.known):
            return overfit
        # Not known counts as well
        return fast if fast.value else self.trainer(TABLE["limits"][role], 1.0)

    # --- ranks

    @cached_property
    def devices(self) -> Value:
        return self.trainer("devices", "auto")

    @cached_property
    def nodes(self) -> Value:
        return self.trainer("num_nodes", 1)

    @cached_property
    def ranks(self) -> int | None:
        """How many ranks there will be; None where that depends on the machine."""
        devices = count(self.devices.value)
        nodes = count(self.nodes.value)
        if self.devices.value == "auto" and self.accelerator.value == "cpu":
            devices = 1  # Lightning's "auto" on the CPU
        return devices * nodes if devices and nodes else None

    @property
    def has_trainer(self) -> bool:
        """Whether the config says how Lightning's Trainer is made.

        Not with a _target_, nor with a strategy beside the section, as NeMo's Megatron recipes have
        them.
        """
        section = self.config.tree.get("trainer")
        return (
            isinstance(section, dict)
            and "_target_" not in section
            and "strategy" not in self.config.tree
        )

    @property
    def several(self) -> bool:
        """Whether several ranks are meant, or possible: the config has a trainer, and not one
        device in all.
        """
        return self.has_trainer and self.ranks != 1

    @property
    def trains(self) -> bool:
        """Whether its script fits the model: not where the config's `mode` says it only tests."""
        return not _TESTING.search(str(self.get("mode").value))

    @property
    def ranks_text(self) -> str:
        """For sentences: 4 ranks."""
        return f"{self.ranks or 'several'} ranks"

    @cached_property
    def accelerator(self) -> Value:
        return self.trainer("accelerator", "auto")

    # --- strategy

    @cached_property
    def strategy(self) -> Value:
        """The strategy: its name, or with _target_ its class."""
        strategy = self.trainer("strategy", "auto")
        if isinstance(strategy.value, dict):
            return self.get("trainer.strategy._target_")
        return strategy

    @cached_property
    def ddp(self) -> bool:
        """Whether it is DistributedDataParallel, which "auto" is for several devices."""
        name = last_part(str(self.strategy.value)).lower()
        return name == "auto" or name.startswith("ddp")

    @cached_property
    def broadcast_buffers(self) -> Value:
        """Whether DDP broadcasts rank 0's buffers at every training step; its default is true."""
        return self.get("trainer.strategy.broadcast_buffers", True)

    @cached_property
    def group_timeout(self) -> timedelta | None:
        """The process group's timeout, None where the config does not say it as a duration.

        DDPStrategy wants a timedelta; in YAML, that is a mapping with _target_: datetime.timedelta.
        """
        timeout = self.get("trainer.strategy.timeout").value
        if not isinstance(timeout, dict):
            return None
        parts = dict(timeout)
        if parts.pop("_target_", None) != "datetime.timedelta":
            return None
        try:
            return timedelta(**parts)
        except (TypeError, OverflowError):
            return None

    # --- what is trained, on what

    @cached_property
    def encoders(self) -> tuple[Encoder, ...]:
        return tuple(encoders.found_in(self.config))

    @property
    def asr_encoder(self) -> bool:
        return str(self.get("model.encoder._target_").value).startswith(
            "nemo.collections.asr."
        )

    @cached_property
    def checkpoints(self) -> tuple[Value, ...]:
        """Where the model comes from, if its encoder is not in the config: its checkpoint's own
        config has it.
        """
        if self.get("model.encoder._target_").given:
            return ()
        values = map(self.get, TABLE["checkpoints"]["of_the_model"])
        return tuple(value for value in values if value.value not in (None, ""))

    @cached_property
    def datasets(self) -> tuple[Dataset, ...]:
        return tuple(each for each in datasets.found_in(self.config) if each.used)

    @property
    def training_of_lhotse(self) -> list[Dataset]:
        return [each for each in self.datasets if each.training and each.lhotse]

    @cached_property
    def multi_configs(self) -> tuple[Section, ...]:
        """The sections that hold the sets of Lhotse's multi_config."""
        return tuple(
            Section(self.config, keys)
            for keys, section in self.config.mappings()
            if keys and keys[-1] in ROLES and section.get("multi_config") is True
        )


def count(devices: Any) -> int | None:
    """How many devices; Lightning accepts a number, a list, or a text of either."""
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if isinstance(devices, list):
        return len(devices) or None
    if isinstance(devices, str) and devices.strip().isdigit():
        devices = int(devices)
    return devices if type(devices) is int and devices > 0 else None
