"""Gateway in one process, upstream another, open loop client a third."""
import asyncio, sys, time, tempfile, socket, os, subprocess, statistics
from pathlib import Path
import aiohttp
UP = '''
import asyncio
from aiohttp import web
async def h(r):
    await r.read()
    await asyncio.sleep(0.02)
    return web.Response(text="ok")
async def main():
    s=web.Server(h, access_log=None)
    runner=web.ServerRunner(s); await runner.setup(); site=web.TCPSite(runner,"127.0.0.1",int(__import__("sys").argv[1])); await site.start()
    await asyncio.Event().wait()
asyncio.run(main())
'''
async def load(url, headers, rate, seconds):
    lat=[]; errs=0
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as c:
        async def one():
            nonlocal errs
            t=time.perf_counter()
            async with c.post(url, data=b'{"a":1}') as a:
                await a.read()
                if a.status!=200: errs+=1
            lat.append(time.perf_counter()-t)
        begin=time.perf_counter(); tasks=[]
        for i in range(int(rate*seconds)):
            due=begin+i/rate
            d=due-time.perf_counter()
            if d>0: await asyncio.sleep(d)
            tasks.append(asyncio.create_task(one()))
        await asyncio.gather(*tasks)
    lat.sort()
    return lat[len(lat)//2]*1e3, lat[int(len(lat)*.99)]*1e3, errs
def gateway(port):
    from nagara.control.control import Control
    from nagara.pool.slots import Slots
    from nagara.testing.fake_node import FakeNode
    class N(FakeNode):
        async def dial(self, replica):
            s=socket.socket(); s.setblocking(False)
            await asyncio.get_running_loop().sock_connect(s,("127.0.0.1",port)); return s
    async def main():
        d=Path(tempfile.mkdtemp())
        c=Control(d/"s", N(), Slots(1))
        def ready(r): print(r.url, r.api_key, flush=True)
        await c.run(ready, app_file=('[app.a]\nimage="host"\ncommand=["x"]\nscale={concurrency=1000,max=1}\n',"f"))
    asyncio.run(main())
if __name__=="__main__":
    if sys.argv[1]=="gw": gateway(int(sys.argv[2]))
    else:
        port=18999
        up=subprocess.Popen([sys.executable,"-c",UP,str(port)])
        gw=subprocess.Popen([sys.executable,__file__,"gw",str(port)],stdout=subprocess.PIPE,text=True)
        url,key=gw.stdout.readline().split()
        time.sleep(.5)
        rate=float(sys.argv[1])
        for _ in range(3):
            d=asyncio.run(load(f"http://127.0.0.1:{port}/",{},rate,4))
            g=asyncio.run(load(url+"/a/x",{"Authorization":"Bearer "+key},rate,4))
            print("direct p50 %.2f p99 %.2f err %d | gw p50 %.2f p99 %.2f err %d | added %.2f %.2f"%(*d,*g,g[0]-d[0],g[1]-d[1]))
        gw.terminate(); up.terminate()
