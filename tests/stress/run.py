"""Runs all configurations, one after another."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence

from servers.paths import ROOT, short_folder
from stress.configs import CONFIGS, Config
from stress.oracle import Oracle
from stress.rig import Rig
from stress.traffic import StressFailed

#: A slow machine may need more epochs than fit its time to see every kind of event.
_MORE_EPOCHS = 4
_LOGS = ROOT / "target" / "stress"


def stress(seconds: float, seed: int, configs: Sequence[Config] = CONFIGS) -> Counter[str]:
    """Runs for about this long and returns the count of each kind of event. Raises `StressFailed`."""
    start = time.monotonic()
    total: Counter[str] = Counter()
    folder = short_folder()
    oracle = Oracle(folder)
    try:
        for number, config in enumerate(configs):
            left = seconds - (time.monotonic() - start)
            total += _one(config, seed, left / (len(configs) - number), oracle)
    except StressFailed as error:
        again = f"make stress SECONDS={seconds:g} SEED={seed} ONLY={config.name}"
        raise StressFailed(f"{error}\n\nrerun: {again}\nlogs: {_LOGS}") from None
    finally:
        oracle.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"stress: seed {seed}, {time.monotonic() - start:.0f} s, {total['finished']} requests compared, 0 wrong, 0 hung"
    )
    print(f"  {', '.join(f'{kind} {count}' for kind, count in sorted(total.items()))}", flush=True)
    return total


def _one(config: Config, seed: int, seconds: float, oracle: Oracle) -> Counter[str]:
    start = time.monotonic()
    rig = Rig(config, seed, oracle)
    try:
        rig.start()
        rig.control()
        ready = time.monotonic() - start
        rig.attach()
        more = _MORE_EPOCHS
        while True:
            rig.epoch()
            missing = rig.counts.missing(config.kinds)
            still = f"; not seen yet: {', '.join(missing)}" if missing else ""
            took = time.monotonic() - start
            print(f"{config.name}: {took:.0f} s, {rig.counts.kinds['finished']} requests{still}", flush=True)
            if time.monotonic() - start >= seconds:
                if not missing:
                    break
                more -= 1
            if more < 0:
                raise StressFailed(f"{config.name} did not see {', '.join(missing)}; counts: {rig.counts}")
    except StressFailed:
        _keep(rig)
        raise
    except AssertionError as error:
        _keep(rig)
        raise rig.failure(str(error)) from error
    finally:
        rig.stop()
    kinds = rig.counts.kinds
    if kinds["undecided"] > config.undecided * kinds["finished"]:
        raise StressFailed(f"{config.name}: too few answers are decided to their last token; counts: {rig.counts}")
    took = time.monotonic() - start
    print(f"{config.name}: seed {seed}, {took:.0f} s, of them {ready:.0f} to start; {rig.counts}", flush=True)
    return kinds


def _keep(rig: Rig) -> None:
    """Keeps the logs after a failure."""
    _LOGS.mkdir(parents=True, exist_ok=True)
    for log in rig.pod.folder.glob("*.log"):
        shutil.copy(log, _LOGS / f"{rig.config.name}-{log.name}")
