"""What a run folder tells about the run's data."""

from pathlib import Path
from typing import Any

import yaml


def data_settings(run_folder: str | Path) -> dict[str, Any]:
    """The settings of the run's data module (folder, block_length, ...); empty where there is no config.yaml."""
    path = Path(run_folder) / "config.yaml"
    if not path.is_file():
        return {}
    data = yaml.safe_load(path.read_text()).get("data") or {}
    return data.get("init_args") or {}
