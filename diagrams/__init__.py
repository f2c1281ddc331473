"""Pictures of what the engine is and does, drawn from its own code where that can be: `make diagrams`."""
