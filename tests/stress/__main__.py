"""python -m stress [--seconds 600] [--seed 1] [--only CONFIG]"""

from __future__ import annotations

import argparse

from stress.configs import CONFIGS
from stress.run import stress

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="stress")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[config.name for config in CONFIGS])
    chosen = parser.parse_args()
    stress(chosen.seconds, chosen.seed, [config for config in CONFIGS if chosen.only in (None, config.name)])
