"""Ray as the engine of many machines. Ray itself is in a process apart, `bridge`, and on them.

    control process                 bridge            Ray            each machine
      RayEngine ──lines of JSON──▶  the driver  ──▶  head, GCS  ──▶  MachineActor ─▶ Supervisor
         │                                                                              │ starts
         └──────────────────── TCP, no Ray on the way ───────────────────────────▶  nagara agent

A head that is gone ends the bridge and nothing else: leases, calls and requests go on.
"""
