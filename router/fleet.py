"""The table of members as metrics show it."""

from baton.core.fleet_metrics import FleetTotals
from baton.router.members import Members


def fleet_totals(members: Members) -> list[FleetTotals]:
    """Every worker that the router knows. Any thread."""
    found = []
    for member in members.all():
        held = member.state.inventory
        found.append(
            FleetTotals(
                worker=member.state.worker_id,
                role=member.state.role,
                is_up=member.alive,
                heartbeat_age_s=members.heartbeat_age_s(member),
                num_lives=member.num_epochs,
                num_blocks={
                    "free": held.num_blocks_free,
                    "reserved": held.num_blocks_reserved,
                    "quarantined": held.num_blocks_quarantined,
                },
                num_held=held.num_attends,
                num_landings=held.num_landings,
            )
        )
    return found
