"""What ``/readyz`` says while the first lists do not come."""

import aiohttp

from nearkv.extender.app import TRANSPORT, build_app
from nearkv.extender.settings import ExtenderSettings
from nearkv.serving import running
from tests.doubles.api_server import ApiServerDouble, Faults
from tests.integration.extender_site import ANY_PORT, until


async def test_readyz_says_what_keeps_the_lists_from_coming(tmp_path):
    async with ApiServerDouble() as api:
        api.inject(Faults(resources=("pods",), status=403))
        kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig")
        settings = ExtenderSettings.model_validate({"kubernetes": {"kubeconfig": str(kubeconfig)}})
        app = build_app(settings)
        async with (
            running(app, ANY_PORT, transport=app[TRANSPORT]) as address,
            aiohttp.ClientSession() as session,
        ):

            async def readyz() -> str:
                async with session.get(f"{address.url}/readyz") as response:
                    return await response.text()

            async def says_why() -> bool:
                return "not all listed yet; pods: 403" in await readyz()

            async def is_ready() -> bool:
                return await readyz() == "ok"

            await until(says_why, what="it says why it is not ready")
            api.inject(Faults())
            await until(is_ready, what="it is ready")
