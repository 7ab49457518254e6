#!/usr/bin/env -S python3 -P
"""Give a prefill worker another incarnation: drained, ended, started by Ray, compared by tokens, routed to again."""

import sys

from baton.runbook.common.command import Runbook, main
from baton.runbook.common.replace import add_options, replace_steps

RUNBOOK = Runbook(
    name="replace-prefill",
    about=__doc__ or "",
    steps=lambda site, options: replace_steps(site, options, "prefill"),
    options=add_options,
)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
