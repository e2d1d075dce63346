"""Workers as Ray actors: places them, watches their health, starts them again, scales and drains them.

Ray is called when workers are placed, restarted or removed, never per request. Of `baton` only this
package knows Ray, and only a process that runs a pool imports it.
"""
