# For scripts in Bash, which source it: prints the comment at their beginning for -h or --help, and exits.
case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
esac
