"""`python -m tests.support.timed_child TASK ANSWER_FILE`: a child that has been timed, and does not end while it is compared."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.protocol import Answer

answer = Answer([1.0], [0.5], [0.9], None, 2.0, None, "not compared: ended before", {}, cut_short=True)
new = Path(sys.argv[2]).with_suffix(".new")
new.write_text(answer.to_json())
new.replace(sys.argv[2])
time.sleep(600)
