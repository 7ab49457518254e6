#!/usr/bin/env -S python3 -P
"""Put new certificates, or another authority, into the files a deployment reads, and see its ports show them."""

import argparse
import sys
from collections.abc import Sequence

from baton.cluster.access import current_access
from baton.core.errors import ConfigInvalid, StepFailed
from baton.runbook.common import workers
from baton.runbook.common.canary import Canaries
from baton.runbook.common.certificates import Replacement, days_left, fingerprint_of, is_trusted, pair_fits, ports
from baton.runbook.common.command import Runbook, main, positive
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, require

SHOWN_S = 30.0  # files are looked at twice a second, on a machine that has time
FLAGS = ("cert_file", "key_file", "ca_file")


def _options(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("cert", "certificate that this host's ports show"),
        ("key", "its private key"),
        ("ca", "who signed certificates"),
    ):
        parser.add_argument(f"--{name}-file", default="", help=f"in use: {what}")
        parser.add_argument(f"--new-{name}-file", default="", help="what is to be in it")
    parser.add_argument("--min-days", type=positive, default=7.0, help="that new certificates must last  [7]")


class _Rotation:
    """What one run knows."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        given = {name: (getattr(options, name), getattr(options, f"new_{name}")) for name in FLAGS}
        halves = [name for name, (old, new) in given.items() if bool(old) != bool(new)]
        if halves:
            raise ConfigInvalid(f"give both --{halves[0].replace('_', '-')} and --new-{halves[0].replace('_', '-')}")
        self._has_pair, self._has_ca = bool(given["cert_file"][0]), bool(given["ca_file"][0])
        if self._has_pair != bool(given["key_file"][0]):
            raise ConfigInvalid("a certificate and its key are replaced together: give all four files")
        if not self._has_pair and not self._has_ca:
            raise ConfigInvalid("give --cert-file and --key-file, or --ca-file, and what is to be in them")
        self._site = site
        order = ("ca_file", "key_file", "cert_file")  # until both are there, the pair before stays in use
        self._files = [Replacement(*given[name]) for name in order if given[name][0]]
        self._cert, self._key, self._ca = (given[name] for name in ("cert_file", "key_file", "ca_file"))
        self._min_days: float = options.min_days
        self._canaries = Canaries(site)
        self._before = fingerprint_of(self._cert[0]) if self._has_pair else ""
        self._own: list[str] = []  # addresses that show what is replaced

    def steps(self) -> Sequence[Step]:
        """Look at the new files and at the ports, replace, look again."""
        pair = Check(
            name="the new certificate is good",
            look=self._look_at_pair,
            next="have it issued anew, by an authority that the deployment trusts, for this host's names",
        )
        trust = Check(
            name="the new authorities are those of every port",
            look=self._look_at_trust,
            next="put old and new authority into one file everywhere; take the old one out after all certificates",
        )
        shown = Verification(
            name="this host's ports show the new certificate",
            look=self._wait_shown,
            next="the old files are back; the router's and the workers' logs say why the new ones were not taken",
        )
        return [
            *([pair] if self._has_pair else []),
            *([trust] if self._has_ca else []),
            *([Check(name="ports show the old certificate", look=self._look_at_ports)] if self._has_pair else []),
            workers.expect(self._canaries),
            *(self._replace(file) for file in self._files),
            *([shown] if self._has_pair else []),
            *([Verification(name="every port is trusted", look=self._look_at_trust)] if self._has_ca else []),
            Verification(
                name="canaries get the tokens expected",
                look=self._ask,
                next="the old files are back; see `baton doctor --address` for what each port shows",
            ),
        ]

    def _replace(self, file: Replacement) -> Action:
        return Action(
            name=f"replace {file.path}",
            do=file.do,
            undo=file.undo,
            is_done=file.is_done,
            next="the file must be writable, and its folder",
        )

    def _look_at_pair(self) -> str:
        pair_fits(self._cert[1], self._key[1])
        left_days = days_left(self._cert[1])
        message = f"{self._cert[1]} ends in {left_days:.1f} days, --min-days is {self._min_days:g}"
        require(left_days >= self._min_days, message, days=round(left_days, 1))
        ca_file = self._ca[1] or current_access().tls.ca_file
        names = [current_access().tls.server_name] if current_access().tls.server_name else []
        is_trusted(self._cert[1], self._key[1], ca_file, names)
        return f"ends in {left_days:.0f} days, fingerprint {fingerprint_of(self._cert[1])[:16]}"

    def _look_at_trust(self) -> str:
        found = ports(self._site.address, self._site.status(), self._ca[1])
        bad = [f"{port.name} ({port.address})" for port in found if port.problem]
        require(not bad, f"not trusted with {self._ca[1]}: {', '.join(bad)}", ports=bad)
        return f"{len(found)} ports"

    def _look_at_ports(self) -> str:
        new = fingerprint_of(self._cert[1])
        found = ports(self._site.address, self._site.status())
        self._own = [port.address for port in found if port.fingerprint in (self._before, new)]
        others = {port.name: port.fingerprint for port in found if port.address not in self._own and port.fingerprint}
        self._site.found |= {"fingerprint": new, "ports": self._own, "other_certificates": others}
        require(bool(self._own), f"no port shows the certificate in {self._cert[0]}", fingerprint=self._before)
        return f"{len(self._own)} ports; {len(others)} show other certificates"

    def _wait_shown(self) -> str:
        new = fingerprint_of(self._cert[1])

        def look() -> bool | None:
            shown = {port.address: port.fingerprint for port in ports(self._site.address, self._site.status())}
            return True if all(shown.get(address, new) == new for address in self._own) else None

        self._site.wait(look, f"every port that showed the old certificate shows {new[:16]}", within_s=SHOWN_S)
        return f"{len(self._own)} ports show {new[:16]}"

    def _ask(self) -> str:
        num = len(self._canaries.round())
        if not num:
            raise StepFailed("no canary was sent")
        return f"{num} canaries with the tokens expected"


RUNBOOK = Runbook(
    name="rotate-certificates",
    about=__doc__ or "",
    steps=lambda site, options: _Rotation(site, options).steps(),
    options=_options,
)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
