# Says which server the Sentinels call the master; fails where none of them has a word.
for number in 0 1 2; do
  master=$(timeout 2 valkey-cli -h "sentinel-$number.sentinel" -p 26379 sentinel get-master-addr-by-name redis 2>&1 | head -n 1)
  case $master in
    redis-*.redis) echo "$master"; exit 0 ;;
  esac
done
exit 1
