# Starts a Sentinel. What it has learnt stays in its file; all else in there is written anew, passwords too.
set -eu
umask 077
file=/data/sentinel.conf
if [ ! -e $file ]; then
  master=$(sh /etc/sentinel/find-master.sh) || master=redis-0.redis
  echo "sentinel monitor redis $master 6379 2" > $file
fi
learnt='monitor|myid|current-epoch|config-epoch|leader-epoch|known-replica|known-sentinel'
may='resetchannels &__sentinel__:* -@all +ping +publish +client|setname +sentinel|is-master-down-by-addr'
{
  grep -E "^sentinel ($learnt) " $file
  cat /etc/sentinel/sentinel.conf
  echo "sentinel announce-ip $POD_NAME.sentinel"
  printf 'sentinel auth-pass redis %s\n' "$(head -n 1 /run/secrets/redis/sentinel)"
  printf 'sentinel sentinel-pass %s\n' "$(head -n 1 /run/secrets/redis/sentinel)"
  printf 'user sentinel on %s %s\n' "$(sed 's/^/>/' /run/secrets/redis/sentinel | tr '\n' ' ')" "$may"
} > $file.new
mv $file.new $file
exec valkey-server $file --sentinel "$@"
