"""One request on its way through the workers, over as many attempts as it takes."""
