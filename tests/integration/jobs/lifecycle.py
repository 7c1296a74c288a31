"""Under the launcher: train, evaluate, train, change gradient accumulation, save, and fail."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from common import data, own_stream, start
from kareus_pp.integrations.deepspeed import attach

STAGES = 2


def main() -> None:
    config, output = json.loads(Path(sys.argv[-2]).read_text()), Path(sys.argv[-1])
    engine = start(STAGES, config)
    session = attach(engine)
    assert session is not None, "the launcher has attached the engine"
    train = data()
    # Every rank trains equally often; the plan is taken up on the way.
    for _ in range(80):
        engine.train_batch(train)
        time.sleep(0.02)
    before = len(session.calls)
    engine.train_batch(train)
    engine.eval_batch(data(), num_micro_batches=2)
    engine.train_batch(train)
    micro = engine.train_micro_batch_size_per_gpu()
    engine.set_train_batch_size(6 * micro)
    for _ in range(3):
        engine.train_batch(train)
    engine.set_train_batch_size(4 * micro)
    engine.train_batch(train)
    engine.save_checkpoint(output / "checkpoint")
    own = {count: own_stream(engine, count) for count in (4, 6)}
    result = output / f"rank{engine.global_rank}.json"
    result.write_text(json.dumps({"calls": session.calls[before:], "own": own}))
    try:
        engine.train_batch(data(failing_after=2))
    finally:
        result.write_text(json.dumps({"calls": session.calls[before:], "own": own}))


if __name__ == "__main__":
    main()
