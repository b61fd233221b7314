"""The demonstration: real engines, one agent, one ingress and a long conversation.

``python -m nearkv.demo run`` and ``demo`` set up what they need (an environment with real
vLLM for CPU, two small models), start every process on the loopback interface, hold the
same conversation that a user of a long document would, and print what the engines
themselves say they computed.

``tiny_model`` and ``small_model`` are scripts for the engine environment's interpreter,
in which this package is not installed; they are run by file path and import nothing from
here.
"""
