"""clora's operator: carries LoRAExperiments to the LoRAEngines that train them, and reports back.

The way of one change, a file a stage: handlers -> reconciler -> observe -> decide -> act. Everything that is policy is
in the pure functions of decide, decide_engine and placement. Needs neither torch nor the engine.
"""
