# Starts Redis as the master or as its replica. Called by the words of a Redis that is alone.
set -eu
until master=$(sh /etc/redis/find-master.sh); do
  # The first start: nobody has chosen yet. Later a word is waited for: the other one may have less than is here.
  if [ ! -e /data/appendonlydir ]; then master=redis-0.redis; break; fi
  sleep 1
done
if [ "$master" != "$POD_NAME.redis" ]; then set -- "$@" --replicaof "$master" 6379; fi
exec valkey-server "$@" --include /run/acl/replica.conf --replica-announce-ip "$POD_NAME.redis" \
  --repl-backlog-size 256mb --client-output-buffer-limit replica 512mb 256mb 120
