"""The process that brings one experiment's metrics to one tracker: `python -m clora_engine.tracker`.

The libraries of trackers run here and nowhere else: not in the engine, whose tokens and adapters are none of their
business. What they need comes over stdin, and what is to be said goes back over stdout (protocol.py). Online, all
connections go through a proxy that knows the hosts which the engine's owner allows (proxy.py).
"""
