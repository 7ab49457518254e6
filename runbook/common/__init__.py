"""What all runbooks share: steps, the command around them, and the deployment that they work on."""
