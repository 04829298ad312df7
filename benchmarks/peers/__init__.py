"""clora beside what a user would pick instead: TRL's GRPOTrainer, and SkyRL by the Tinker SDK. See __main__.py."""
