"""Python imports this at its start where this folder is on the path: a daemon soon tries a team's server again.

It waits a minute for an answer, since other work may delay one, or `TEAM_LIMIT_S` seconds where the server is to be given up.
"""

import os
import sys

if "start" in sys.orig_argv:
    from pygraphd.daemon.team import connecting, queue, tables, tier, wanted, worker

    limit_s = int(os.environ.get("TEAM_LIMIT_S", "60"))
    connecting.Database.__init__.__defaults__ = (float(limit_s),)
    connecting._OPTIONS["connect_timeout"] = connecting.CONNECT_S = limit_s
    worker.FIRST_PAUSE_S = worker.LONGEST_PAUSE_S = 0.1
    worker.LINGER_S = float(os.environ.get("TEAM_LINGER_S", "0.5"))
    worker._RIGHTS_PAUSE_S = 0.1, 0.1
    queue.Queue.__init__.__defaults__ = (int(os.environ.get("TEAM_MOST", queue.MAX_QUEUED)),)
    wanted.AGAIN_S = 0.0
    tier.AWAITED_S = float(os.environ.get("TEAM_AWAITED_S", tier.AWAITED_S))
    if os.environ.get("TEAM_IS_OLDER"):
        vars(worker)["VERSIONS"] = (*tables.VERSIONS, "9998")
