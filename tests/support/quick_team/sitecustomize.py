"""Python imports this at its start where this folder is on the path: a daemon soon gives a team's server up, and soon tries again."""

import os
import sys

if "start" in sys.orig_argv:
    from pygraphd.daemon.team import connecting, tables, wanted, worker

    connecting.Database.__init__.__defaults__ = (2.0,)
    connecting._OPTIONS["connect_timeout"] = 2
    connecting.CONNECT_S = 2
    worker.FIRST_PAUSE_S = worker.LONGEST_PAUSE_S = 0.1
    worker.LINGER_S = 0.5
    worker._RIGHTS_PAUSE_S = 0.1, 0.1
    wanted.AGAIN_S = 0.0
    if os.environ.get("TEAM_IS_OLDER"):
        vars(worker)["VERSIONS"] = (*tables.VERSIONS, "9998")
