"""The same engine on a device that is not here: shapes, devices, costs, workloads. Numbers only; numpy at most."""
