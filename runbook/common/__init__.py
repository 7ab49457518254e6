"""What every runbook is made of: steps, the command around them, and the deployment they work on."""
