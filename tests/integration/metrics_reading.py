"""Reading an ingress's own series."""

import re

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_VALUE = re.compile(r'\w+="([^"]*)"')


async def counts(ingress, name):
    """Return the samples of ``nearkv_ingress_<name>`` by label values."""
    async with ingress.session.get(ingress.url + "/metrics") as answer:
        text = await answer.text()
    wanted = {f"nearkv_ingress_{name}", f"nearkv_ingress_{name}_total"}
    found = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample and sample[1] in wanted:
            found[tuple(_VALUE.findall(sample[2] or ""))] = int(float(sample[3]))
    return found
