"""Find the fastest plan of the bundled model on this machine, save it, and use it.

python examples/tune.py
"""

import jacobiflow as jf

flow = jf.load("mnist")
plan = jf.tune(flow, batch_size=4, max_deviation=0.05, labels=3, progress=print)
print(plan)
measured = plan.about["measured"]
print(f"{measured['speedup']:.2f}x sequential decoding, largest deviation {measured['deviation']:.2g}")
plan.save("plan.json")
print(flow.sample(4, labels=3, plan="plan.json", seed=1).stats.seconds, "s for four samples")
