#!/usr/bin/env -S python3 -P
"""Give a decode worker another incarnation: drained, ended, started by Ray, compared by tokens, routed to again."""

import sys

from baton.runbook.common.command import Runbook, main
from baton.runbook.common.replace import add_options, replace_steps

RUNBOOK = Runbook(
    name="replace-decode",
    about=__doc__ or "",
    steps=lambda site, options: replace_steps(site, options, "decode"),
    options=add_options,
)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
