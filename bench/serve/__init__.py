"""`baton bench serve`: workloads, their schedules, client processes, figures and rows for any OpenAI endpoint."""
