"""Every Lua script, each run by one typed method that gives it its KEYS and ARGV; sync and async clients run it alike.

A change to more than one key is one script: it happens wholly or not at all. What a script may *write* first matters:
a full server (maxmemory, noeviction) refuses commands that need memory, but only until a script has written once. So
scripts that free memory, deliver, or keep a learner there that will free it, begin with XTRIM, HDEL, XACK or DEL, and
go through. Those that ask for more, as for tickets, do not.
"""
