"""Scripts that solve the built-in tasks from their public files, as a capable agent would write them."""

BLENDING = r"""
import csv, harness, itertools, json, re

task = json.load(open("problem.json"))
text = task["en_question"]
items = [[float(part) for part in found] for found in re.findall(
    r"- [^:]+: ([\d.]+) USD a sack, (\d+) g protein and (\d+) g fibre per kg, (\d+) sacks", text)]
sacks, protein, fibre = [int(re.search(pattern, text)[1]) for pattern in (
    r"exactly (\d+) sacks", r"at least (\d+) g protein", r"most (\d+) g fibre")]
best = min(
    sum(count * item[0] for count, item in zip(plan, items))
    for plan in itertools.product(*(range(int(item[3]) + 1) for item in items))
    if sum(plan) == sacks
    and sum(count * item[1] for count, item in zip(plan, items)) >= protein * sacks
    and sum(count * item[2] for count, item in zip(plan, items)) <= fibre * sacks
)
with open(harness.inputs["submission"], "w", newline="") as file:
    csv.writer(file).writerows([("id", "answer"), (task["id"], f"@cost[{best:.2f}]")])
print("lowest cost", round(best, 2))
"""

FISHERY = r"""
import csv, harness, json, re
from scipy.integrate import solve_ivp

task = json.load(open("problem.json"))
growth, capacity, start, catch, years = [float(re.search(pattern, task["en_question"])[1]) for pattern in (
    r"a rate of ([\d.]+)", r"could feed ([\d.]+)", r"At first there are ([\d.]+)",
    r"From then on ([\d.]+)", r"after ([\d.]+) years")]
found = solve_ivp(lambda t, p: growth * p * (1 - p / capacity) - catch, (0, years), [start], rtol=1e-10, atol=1e-10)
stock = found.y[0][-1]
with open(harness.inputs["submission"], "w", newline="") as file:
    csv.writer(file).writerows([("id", "answer"), (task["id"], f"@value[{stock:.6g}]")])
print("stock", stock)
"""

PUMPS = r"""
import harness
import numpy as np
import pandas as pd
from scipy.optimize import minimize

train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")

def features(table):
    strain = (table.load - 0.75).clip(lower=0)
    vibration = table.vibration.fillna(train.vibration.median())
    plain = np.column_stack([table.age, strain, strain * table.age, vibration, table.temperature])
    makers = np.column_stack([table.maker == maker for maker in sorted(train.maker.unique())[1:]])
    return np.column_stack([plain, makers]).astype(float)

seen, unseen = features(train), features(test)
mean, spread = seen.mean(axis=0), seen.std(axis=0)
seen, unseen = [np.column_stack([np.ones(len(x)), (x - mean) / spread]) for x in (seen, unseen)]
sign = np.where(train.failed == 1, 1, -1)
loss = lambda w: np.logaddexp(0, -sign * (seen @ w)).sum() + 0.5 * (w[1:] ** 2).sum()
weights = minimize(loss, np.zeros(seen.shape[1])).x
pd.DataFrame({"id": test.id, "failed": unseen @ weights}).to_csv(harness.inputs["submission"], index=False)
"""

RINGDOWN = r"""
import harness
import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from scipy.signal import find_peaks

record = pd.read_csv("record.csv")
t, y = record.seconds.to_numpy(), record.acceleration.to_numpy()
size = np.abs(np.fft.rfft(y))
frequencies = np.fft.rfftfreq(len(t), t[1] - t[0])
peaks = find_peaks(size, distance=20)[0]
start = sorted(frequencies[sorted(peaks, key=lambda peak: -size[peak])[:3]])

def waves(f, d):
    damped = np.exp(-np.outer(t, d))
    angle = 2 * np.pi * np.outer(t, f)
    return np.hstack([damped * np.cos(angle), damped * np.sin(angle)])

def left(x):
    basis = waves(x[:3], x[3:])
    return y - basis @ np.linalg.lstsq(basis, y, rcond=None)[0]

found = least_squares(left, [*start, 0.5, 0.5, 0.5], x_scale=[0.01] * 3 + [0.1] * 3).x
np.save(harness.inputs["submission"], np.column_stack([found[:3], found[3:]]))
"""

BUILT_IN = {"engineering": BLENDING, "mathmodeling": FISHERY, "mle": PUMPS, "science": RINGDOWN}


def replies(benchmark: str) -> list[str]:
    """What a model says that solves a family's built-in tasks."""
    experiment = (
        f"<Hypothesis>it can be computed</Hypothesis><Experiment>```python\n{BUILT_IN[benchmark]}\n```</Experiment>"
    )
    return [experiment, "<Inference>it is written</Inference><Conclusion>done</Conclusion>"]
